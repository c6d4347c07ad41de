"""The orchestrator's side of one environment's workers: who runs which rollout, and what becomes of those who die.

place ──▶ the ready worker with fewest rollouts, and room for one more; else wait in line
a worker ends, hangs, or says something that is no record ──▶ its calls end, another one is started
a worker is old or too large ──▶ drained: no new calls, closed when its last one is over, replaced at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol, TypeAlias, get_args

from paceline.config.workers import ProcessWorkers, RayWorkers
from paceline.envs.protocol import InfrastructureError
from paceline.envs.surroundings import InRun
from paceline.envs.workers import wire
from paceline.envs.workers.worker import CLOSE_S, PULSE_S
from paceline.errors import ConfigError, EnvError, PacelineError, said_by

log = logging.getLogger(__name__)

_FIRST_S, _MOST_S = 0.1, 10.0
"""Seconds between attempts to replace a worker that ended before it was of any use, doubling."""


class Link(Protocol):
    """A connection to one worker."""

    def send(self, record: wire.ToWorker) -> None:
        """Never blocks. TypeError for what is not JSON-like, TooLarge for what no frame holds."""
        ...

    async def receive(self) -> list[wire.FromWorker] | None:
        """What it says next; None when it has ended. EnvError for what is no record."""
        ...

    async def close(self, within_s: float) -> str:
        """Wait that long for its end, then make it end; says how it ended. May be called twice."""
        ...


Launch = Callable[[str], Awaitable[Link]]
"""Starts a worker of that name. Raises PacelineError when it cannot."""


class Died:
    """What a call is told when its worker has ended."""

    def __init__(self, why: str) -> None:
        self.why = why


OfCall: TypeAlias = wire.Ask | wire.GiveUp | wire.BeginServe | wire.EndServe | wire.Ended
"""What a worker says of one rollout."""

_OF_CALL = get_args(OfCall)


class Call:
    """One rollout at one worker."""

    __slots__ = ("inbox", "member", "number")

    def __init__(self, number: int, member: Member) -> None:
        self.number = number
        self.member = member
        self.inbox: asyncio.Queue[OfCall | Died] = asyncio.Queue()

    def send(self, record: wire.ToWorker) -> None:
        self.member.link.send(record)


class Member:
    """One worker that is ready, or was."""

    __slots__ = (
        "calls",
        "cold",
        "groups",
        "is_draining",
        "link",
        "name",
        "opened_at",
        "seen_at",
        "served",
        "timer",
        "why",
    )

    def __init__(self, name: str, link: Link, now: float) -> None:
        self.name = name
        self.link = link
        self.calls: dict[int, Call] = {}
        self.groups: dict[Hashable, int] = {}
        """Groups that run here whole, and how many of their calls are not over."""
        self.cold: dict[int, asyncio.Task[None]] = {}
        """Places for sandboxes it asked for: granted when the task is done."""
        self.is_draining = False
        self.opened_at = self.seen_at = now
        self.served = 0
        self.timer: asyncio.TimerHandle | None = None
        self.why = ""
        """Why we ended it, if we did."""


class WorkerPool:
    """The workers of one environment. `start` first; `close` at the end."""

    def __init__(
        self,
        label: str,
        opening: wire.Open,
        launch: Launch,
        settings: ProcessWorkers | RayWorkers,
        surroundings: InRun,
    ) -> None:
        self.label = label
        self.opened = wire.Opened()
        """What the workers said of their environment; set by `start`."""
        self.deaths = 0
        """Workers that ended by themselves, or were killed."""
        self.recycled = 0
        self._opening = opening
        self._launch = launch
        self._settings = settings
        self._surroundings = surroundings
        self._members: list[Member] = []
        self._homes: dict[Hashable, Member] = {}
        self._waiting: deque[tuple[Hashable | None, asyncio.Future[Call]]] = deque()
        self._next_call = 0
        self._next_name = 0
        self._hopes = 0
        """Workers on their way whose start has not failed yet: worth waiting for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure = ""
        """Why the last attempt to start a worker failed; empty when it did not."""
        self._failures = 0
        self._closing = False

    @property
    def workers(self) -> list[Member]:
        """Those that are alive."""
        return list(self._members)

    async def start(self) -> None:
        """Start all workers, side by side. ConfigError, with the first one's words, if any does not come up."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            results = await asyncio.gather(
                *(self._begin() for _ in range(self._settings.count)), return_exceptions=True
            )
            for result in results:
                if isinstance(result, PacelineError):
                    raise ConfigError(f"env {self.label!r}: {result}") from result
                if isinstance(result, BaseException):
                    raise result
            stack.pop_all()

    async def close(self) -> None:
        """Let every worker close its environment and end; make it after a while."""
        self._closing = True
        self._fail_waiting("the workers are being closed")
        members = list(self._members)
        for member in members:
            member.link.send(wire.Close())
        await asyncio.gather(*(member.link.close(CLOSE_S + 1.0) for member in members))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # ── rollouts ──

    async def call(self, group: Hashable | None = None) -> Call:
        """A place at a worker, once there is one; those of one `group` get the same worker.

        InfrastructureError when no worker can be had.
        """
        member = self._home(group) or (None if self._waiting else self._with_room())
        if member is not None:
            return self._placed(member, group)
        if not self._members and not self._hopes:
            raise InfrastructureError(f"no worker of env {self.label!r}: {self._failure or 'closed'}")
        waits: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, waits))
        try:
            return await waits
        except asyncio.CancelledError:
            if waits.done() and not waits.cancelled() and waits.exception() is None:
                self.release(waits.result(), group)  # placed in the very moment
            raise

    def _placed(self, member: Member, group: Hashable | None) -> Call:
        self._next_call += 1
        call = Call(self._next_call, member)
        member.calls[call.number] = call
        if group is not None:
            self._homes[group] = member
            member.groups[group] = member.groups.get(group, 0) + 1
        return call

    def release(self, call: Call, group: Hashable | None = None) -> None:
        """The call is over."""
        member = call.member
        if member.calls.pop(call.number, None) is None or member not in self._members:
            return  # given back before, or lost with its worker, for which another one is on its way
        member.link.send(wire.Forget(call.number))
        member.served += 1
        self._failures = 0
        if group is not None:
            member.groups[group] -= 1
            if not member.groups[group]:
                del member.groups[group]
                self._homes.pop(group, None)
        self._look_at(member, 0.0)
        self._admit()

    def _home(self, group: Hashable | None) -> Member | None:
        return None if group is None else self._homes.get(group)

    def _with_room(self) -> Member | None:
        most = self._settings.rollouts
        free = [m for m in self._members if not m.is_draining and len(m.calls) < most]
        return min(free, key=lambda m: len(m.calls), default=None)

    def _admit(self) -> None:
        """Give those who wait in line a place, in order."""
        while self._waiting:
            group, waits = self._waiting[0]
            if not waits.done():
                member = self._home(group) or self._with_room()
                if member is None:
                    return
                waits.set_result(self._placed(member, group))
            self._waiting.popleft()

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            _, waits = self._waiting.popleft()
            if not waits.done():
                waits.set_exception(InfrastructureError(f"no worker of env {self.label!r}: {why}"))

    # ── workers that come and go ──

    async def _begin(self) -> None:
        """Start one worker and wait until it is ready. PacelineError, with its last words, when it does not get there."""
        name = f"env-{self.label}-{self._next_name}"
        self._next_name += 1
        link = await self._launch(name)
        try:
            opened = await self._until_opened(name, link)
        except BaseException:
            await link.close(0.0)
            raise
        if self._closing:
            await link.close(0.0)
            return
        self.opened = opened
        self._failure = ""
        member = Member(name, link, asyncio.get_running_loop().time())
        self._members.append(member)
        self._set_timer(member)
        self._spawn(self._attend(member))
        self._admit()

    async def _until_opened(self, name: str, link: Link) -> wire.Opened:
        limit = self._settings.start_s
        link.send(self._opening)
        try:
            async with asyncio.timeout(limit):
                while (records := await link.receive()) is not None:
                    for record in records:
                        if isinstance(record, wire.Opened):
                            if record.error:
                                raise ConfigError(record.error)
                            return record
        except TimeoutError:
            raise EnvError(
                f"{name} was not ready within {limit:g} s (workers.start_s); {await link.close(0.0)}"
            ) from None
        raise EnvError(f"{name} ended before it was ready: {await link.close(1.0)}")

    async def _attend(self, member: Member) -> None:
        """Hear one worker until it ends; then see to what it leaves behind."""
        why = ""
        try:
            while (records := await member.link.receive()) is not None:
                member.seen_at = asyncio.get_running_loop().time()
                for record in records:
                    self._heard(member, record)
        except EnvError as error:
            why = str(error)
        except Exception as error:  # nobody hears this worker any more: its rollouts must not wait for it
            why = f"reading what it says failed: {said_by(error)}"
            log.exception("worker %s is not heard any more", member.name)
        if why and not member.why:
            member.why = why
        ended = await member.link.close(0.5 if member.why or self._closing else 2.0)
        self._buried(member, member.why or ended)

    def _heard(self, member: Member, record: wire.FromWorker) -> None:
        if isinstance(record, wire.GiveUp) and not record.call:
            self._end_cold(member, record.ask)
        elif isinstance(record, _OF_CALL):
            if (call := member.calls.get(record.call)) is not None:
                call.inbox.put_nowait(record)
        elif isinstance(record, wire.Pulse):
            self._look_at(member, record.rss_mb)
        elif isinstance(record, wire.BeginCold):
            member.cold[record.ask] = self._spawn(self._cold_start(member, record.ask))
        elif isinstance(record, wire.EndCold):
            self._end_cold(member, record.ask)
        elif isinstance(record, wire.AskService):
            self._spawn(self._serve(member, record))

    def _buried(self, member: Member, why: str) -> None:
        """A worker is gone: its calls end, its places are free, and another one is started."""
        self._members.remove(member)
        if member.timer is not None:
            member.timer.cancel()
        for ask in list(member.cold):
            self._end_cold(member, ask)
        for group in member.groups:
            self._homes.pop(group, None)
        for call in member.calls.values():
            call.inbox.put_nowait(
                Died(f"worker {why}" if member.name in why else f"worker {member.name}: {why}")
            )
        if self._closing:
            return
        if not member.is_draining:
            self.deaths += 1
            log.warning("a worker ended with %d rollouts: %s", len(member.calls), why)
            self._failures = 0 if member.served else self._failures + 1
            self._hopes += 1
            self._spawn(self._replace())

    async def _replace(self) -> None:
        """Get a worker for one that is gone, however long it takes. Counted among the hopes until it fails first."""
        hopes = 1
        while not self._closing:
            if self._failures:
                await asyncio.sleep(min(_MOST_S, _FIRST_S * 2 ** min(self._failures, 16)))
            try:
                await self._begin()
                break
            except PacelineError as error:
                self._failures += 1
                self._failure = str(error)
                log.warning("no worker for env %r: %s", self.label, error)
            self._hopes -= hopes
            hopes = 0
            if not self._members and not self._hopes:
                self._fail_waiting(self._failure)
        self._hopes -= hopes

    def _set_timer(self, member: Member) -> None:
        """Look at it when it would have been silent for too long."""
        loop = asyncio.get_running_loop()
        due = member.seen_at + self._settings.hang_s

        def look() -> None:
            now = loop.time()
            if (
                now - due > PULSE_S
            ):  # our own loop was held up: what the worker said meanwhile is yet to be read
                member.seen_at = now
            silent = now - member.seen_at
            if silent < self._settings.hang_s:
                self._set_timer(member)
                return
            member.why = (
                f"no sign of life for {silent:.1f} s (workers.hang_s): its code blocks the loop; killed"
            )
            self._spawn(self._kill(member))

        member.timer = loop.call_at(due, look)

    async def _kill(self, member: Member) -> None:
        await member.link.close(0.0)

    def _look_at(self, member: Member, rss_mb: float) -> None:
        """Drain it if it is old or too large; end it when it is drained."""
        settings = self._settings
        if not member.is_draining and not self._closing:
            age = asyncio.get_running_loop().time() - member.opened_at
            why = ""
            if settings.recycle_mb is not None and rss_mb > settings.recycle_mb:
                why = f"{rss_mb:.0f} MB > recycle_mb {settings.recycle_mb}"
            elif settings.recycle_rollouts is not None and member.served >= settings.recycle_rollouts:
                why = f"{member.served} rollouts (recycle_rollouts)"
            elif settings.recycle_s is not None and age > settings.recycle_s:
                why = f"{age:.0f} s old (recycle_s)"
            if why:
                member.is_draining = True
                self.recycled += 1
                log.info("%s is drained and replaced: %s", member.name, why)
                self._hopes += 1
                self._spawn(self._replace())
        if member.is_draining and not member.calls and not member.why:
            member.why = "drained"
            member.link.send(wire.Close())
            self._spawn(self._end_drained(member))

    async def _end_drained(self, member: Member) -> None:
        await member.link.close(CLOSE_S + 1.0)

    # ── what a worker asks for ──

    async def _cold_start(self, member: Member, ask: int) -> None:
        await self._surroundings.cold_starts.begin()
        member.link.send(wire.Served(ask, None))

    def _end_cold(self, member: Member, ask: int) -> None:
        task = member.cold.pop(ask, None)
        if task is None:
            return
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            self._surroundings.cold_starts.end()

    async def _serve(self, member: Member, asked: wire.AskService) -> None:
        try:
            value = await self._surroundings.ask(asked.service, asked.request)
            member.link.send(wire.Served(asked.ask, value))
        except Exception as error:  # anybody's callable: told to whoever asked
            member.link.send(wire.Refused(0, asked.ask, "error", said_by(error)))

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the workers of env %r: %s", self.label, said_by(error), exc_info=error)
