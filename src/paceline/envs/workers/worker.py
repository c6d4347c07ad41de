"""In the worker: the environment, its tasks, and the rollouts that the orchestrator asks for.

Knows nothing of how records come and go: `take` is given those of the orchestrator, `send` takes those for it. The
programs around it are `start` (a process) and `ray_actor` (an actor).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec

from paceline.domain.ids import RolloutId
from paceline.domain.task import Task
from paceline.envs.causes import cause_of, is_interruption
from paceline.envs.endpoint import Endpoint
from paceline.envs.plain import close_after_chores
from paceline.envs.protocol import Context, Environment, Result, RolloutTruncated, TaskSource, task_data
from paceline.envs.registry import make_environment, tasks_of
from paceline.envs.tool_env import declares_tools
from paceline.envs.workers import wire
from paceline.envs.workers.remote import Questions, RemoteModel, reply_of
from paceline.errors import PacelineError, said_by

PULSE_S: Final = 0.5
"""Seconds between two signs of life."""

CLOSE_S: Final = 5.0
"""Seconds that rollouts and the environment may take to stop when the worker closes."""


class Worker:
    """Serves one environment, any number of rollouts at once, on the loop it is called from."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.closed = asyncio.Event()
        """Set when everything has stopped and the process may end."""
        self._send = send
        self._environment: Environment | None = None
        self._source: TaskSource | None = None
        self._questions = Questions()
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reached: set[str] = set()
        """Addresses of gateways that have answered from here."""

    def take(self, record: wire.ToWorker) -> None:
        """Act on one record of the orchestrator. Never raises for what it holds."""
        call = self._calls.get(getattr(record, "call", 0))
        if isinstance(record, wire.Start):
            self._start(record)
        elif isinstance(record, wire.Replied):
            if call is not None:
                call.model.questions.answer(record.ask, reply_of(record.said))
        elif isinstance(record, wire.Refused):
            if not record.call:
                self._questions.refuse(record)
            elif call is not None:
                call.model.questions.refuse(record)
        elif isinstance(record, wire.Serving):
            if call is not None:
                call.model.questions.answer(record.ask, Endpoint(record.base_url, record.secret))
        elif isinstance(record, wire.Unserved):
            if call is not None:
                call.model.questions.answer(
                    record.ask, None if record.said is None else reply_of(record.said)
                )
        elif isinstance(record, wire.Served):
            self._questions.answer(record.ask, record.value)
        elif isinstance(record, wire.Cancel):
            if call is not None and call.running is not None:
                call.running.cancel()
        elif isinstance(record, wire.Judge):
            if call is not None:
                self._judge(call, record)
        elif isinstance(record, wire.Forget):
            self._calls.pop(record.call, None)
        elif isinstance(record, wire.Open):
            self._run(self._open(record))
        else:
            self._run(self._close())

    def pulse(self, lag_ms: float) -> None:
        """Say that the loop turns."""
        running = sum(call.running is not None for call in self._calls.values())
        self._send(wire.Pulse(running, resident_mb(), lag_ms))

    async def beat(self) -> None:
        """Pulse for as long as the worker lives."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.pulse(1000 * max(0.0, loop.time() - due))

    # ── opening and closing ──

    async def _open(self, record: wire.Open) -> None:
        for folder in reversed(record.path):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        try:
            environment = make_environment(record.env_id, record.args)
            source = tasks_of(environment, record.split, record.label)
        except PacelineError as error:
            self._send(wire.Opened(error=str(error), pid=os.getpid()))
            return
        environment.bind(_Surroundings(record.group_size, self._questions, self._send))
        self._environment, self._source = environment, source
        self._send(
            wire.Opened(
                size=source.size,
                fingerprint=source.fingerprint,
                all_or_nothing=environment.all_or_nothing,
                whole_group=environment.whole_group,
                replayable=environment.replayable,
                roles=tuple(getattr(environment, "roles", ())),
                has_tools=declares_tools(environment),
                pid=os.getpid(),
            )
        )

    async def _close(self) -> None:
        running = [call.running for call in self._calls.values() if call.running is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_S)
        if self._environment is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await close_after_chores(self._environment, CLOSE_S / 2)
            except Exception as error:  # anybody's code; the process ends in any case
                print(f"closing the environment failed: {said_by(error)}", file=sys.stderr, flush=True)
        self.closed.set()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── rollouts ──

    def _send_of(self, rollout: RolloutId, record: wire.FromWorker) -> None:
        """Say something of one rollout. TypeError for what is not JSON-like, TooLarge, with its name, for too much."""
        try:
            self._send(record)
        except wire.TooLarge as error:
            raise wire.TooLarge(f"rollout {rollout}: {error}") from None

    def _start(self, record: wire.Start) -> None:
        loop = asyncio.get_running_loop()
        ctx = Context(
            record.rollout,
            group_seed=record.group_seed,
            noise_seed=record.noise_seed,
            deadline=loop.time() + record.seconds,
            clock=loop.time,
        )
        send = partial(self._send_of, record.rollout)
        model = RemoteModel(record.call, send, self._reached)
        call = self._calls[record.call] = _Call(record.call, Task(record.task, None), model, ctx)
        call.running = self._run(self._ended(call, self._roll_out(call)))

    async def _roll_out(self, call: _Call) -> Result:
        assert self._environment is not None
        assert self._source is not None
        call.task = Task(call.task.ref, await task_data(self._environment, self._source, call.task.ref.index))
        return await self._environment.rollout(call.task, call.model, call.ctx)

    def _judge(self, call: _Call, record: wire.Judge) -> None:
        assert self._environment is not None
        if record.said is not None:
            call.model.last = reply_of(record.said)
        call.ctx.deadline = max(call.ctx.deadline, asyncio.get_running_loop().time() + record.seconds)
        judging = self._environment.on_truncated(call.task, call.model, call.ctx, record.limit)
        call.running = self._run(self._ended(call, judging))

    async def _ended(self, call: _Call, work: Coroutine[Any, Any, Any]) -> None:
        """Do it, and say how it ended: once, whatever happens."""
        told: wire.Told | None = None
        failure: wire.Failure | None = None
        try:
            result = await work
            if isinstance(result, Result):
                told = told_of(result)
            elif result is not None:  # anybody's code: what the signature says need not be so
                failure = wire.Failure(
                    "environment", f"EnvError: it returned {type(result).__name__}; expected Result"
                )
        except BaseException as error:
            failure = failure_of(error)
        call.running = None
        try:
            self._send_of(call.ctx.rollout, wire.Ended(call.number, told, failure))
        # Half a character, say, in the name of a file: the orchestrator waits for the end, in whatever words.
        except (TypeError, ValueError, OverflowError, wire.TooLarge) as error:
            if failure is None or isinstance(error, wire.TooLarge):
                failure = wire.Failure("environment", f"EnvError: its result cannot be sent: {error}")
            self._send(wire.Ended(call.number, None, _escaped(failure)))


class _Call:
    """One rollout here. It is kept until it is forgotten: a limit's judgement may be asked for."""

    __slots__ = ("ctx", "model", "number", "running", "task")

    def __init__(self, number: int, task: Task, model: RemoteModel, ctx: Context) -> None:
        self.number = number
        self.task = task
        self.model = model
        self.ctx = ctx
        self.running: asyncio.Task[None] | None = None


class _Surroundings:
    """What surrounds the environment, by way of the orchestrator: limits hold over all workers."""

    def __init__(self, group_size: int, questions: Questions, send: Callable[[Any], None]) -> None:
        self.group_size = group_size
        self._questions = questions
        self._send = send

    @asynccontextmanager
    async def cold_start(self) -> AsyncIterator[None]:
        number, future = self._questions.open()
        self._send(wire.BeginCold(number))
        try:
            await future
        except asyncio.CancelledError:
            # Granted or not: the orchestrator takes the place back, or the question out of the line.
            self._send(wire.GiveUp(0, number))
            raise
        finally:
            self._questions.close(number)
        try:
            yield
        finally:
            self._send(wire.EndCold(number))

    async def ask(self, service: str, request: Any) -> Any:
        number, future = self._questions.open()
        self._send(wire.AskService(number, service, msgspec.to_builtins(request)))
        try:
            return await future
        finally:
            self._questions.close(number)


def told_of(result: Result) -> wire.Told:
    """A result that can cross: numbers as numbers, `info` left out where it is not JSON-like."""
    info: Any = result.info
    if problem := wire.storable(info):
        info = {"not_stored": f"info is not JSON-like: {problem}"}
    return wire.Told(
        _number(result.reward),
        _numbers(result.rewards),
        _numbers(result.metrics),
        result.truncated if result.truncated is None else str(result.truncated),
        info,
        [_number(value) for value in result.turn_rewards],
        str(result.role),
        bool(result.trains),
    )


def _number(value: Any) -> Any:
    if value is None or type(value) in (float, bool) or (type(value) is int and abs(value) < 2**63):
        return value
    with contextlib.suppress(Exception):  # anybody's object; the runner then says that it is no number
        return float(value)
    return repr(value)


def _numbers(values: Any) -> Any:
    return {str(k): _number(v) for k, v in values.items()} if isinstance(values, dict) else repr(values)


def failure_of(error: BaseException) -> wire.Failure:
    """What was raised, as the runner would have judged it inline."""
    interrupted = is_interruption(error)
    if isinstance(error, asyncio.CancelledError):
        return wire.Failure("cancelled", said_by(error), interrupted=True)
    if isinstance(error, RolloutTruncated):
        return wire.Failure("truncated", str(error), str(error.limit), interrupted=True)
    kind = cause_of(error)
    if isinstance(error, BaseExceptionGroup):
        text = "; ".join(said_by(leaf) for leaf in error.exceptions)
    else:
        text = said_by(error)
    return wire.Failure(kind, text, interrupted=interrupted)


def _escaped(failure: wire.Failure) -> wire.Failure:
    """The same in ASCII: names of files may hold what UTF-8 cannot."""
    text, limit = (
        None if said is None else str(said).encode("ascii", "backslashreplace").decode()
        for said in (failure.text, failure.limit)
    )
    return wire.Failure(failure.kind, text or "", limit, failure.interrupted)


def resident_mb() -> float:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
