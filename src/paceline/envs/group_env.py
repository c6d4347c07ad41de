"""Whole groups in one call, and several agents in one episode.

The members of a group are rollouts like any other: each has its permit, its record, its one trainable trace. Here they
meet: the last to arrive starts the shared call, and each gets its own result of it.

    member 0 ─┐                                             ┌─▶ Result 0
    member 1 ─┼─▶ all there ─▶ rollout_group(task, seats) ──┼─▶ Result 1
    member 2 ─┘                                             └─▶ Result 2
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Task
from paceline.envs.protocol import Context, Environment, Model, Result
from paceline.errors import EnvError

Ended: TypeAlias = Result | Exception
"""How a seat's part in a shared call went: an exception is raised in that member alone, as if it ran by itself."""


class Seat:
    """One member's part in a shared call."""

    __slots__ = ("ctx", "member", "model", "role")

    def __init__(self, model: Model, ctx: Context, member: int, role: str = "") -> None:
        self.model = model
        """Its own model: its own conversation, trace and limits."""
        self.ctx = ctx
        self.member = member
        self.role = role


class GroupEnv(Environment):
    """Runs the members of a group in one call: for scores that need all of them, or a world that they share.

    A member that the run cancels, or whose deadline passes, ends the call for all.
    """

    whole_group = True
    all_or_nothing = True

    async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Ended]:
        """Carry out all members; one `Result` a seat, in order. Calls of different seats may run side by side.

        What is raised here is every member's; an exception in place of a `Result` is that member's alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rollout_group(task, seats)")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        key = (ctx.rollout.group, ctx.rollout.attempt)
        party = self._parties.joined(key, self.surroundings.group_size)
        mine = party.join(Seat(model, ctx, ctx.rollout.member))
        if party.is_whole:
            party.call = asyncio.get_running_loop().create_task(self._together(task, party))
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.cancelled():  # by the run: what is shared cannot go on without one
                if party.call is None:
                    self._parties.broke(key)
                await party.end()
            raise

    async def _together(self, task: Task, party: _Party) -> None:
        seats = party.seats
        try:
            results = await _awaited("rollout_group", self.rollout_group(task, seats))
            if not isinstance(results, Sequence):
                raise EnvError(
                    f"rollout_group() returned {type(results).__name__}; expected a list with a Result for each seat"
                )
            if len(results) != len(seats):
                raise EnvError(f"rollout_group() returned {len(results)} results for {len(seats)} seats")
        except BaseException as error:
            party.fail(error)
            return
        for waits, ended in zip(party.waits, results, strict=True):
            _settle(waits, ended)

    @property
    def _parties(self) -> _Parties:
        # Not made in __init__, which a subclass need not call.
        parties: _Parties = self.__dict__.setdefault("_parties_", _Parties())
        return parties


class MultiAgentEnv(GroupEnv):
    """Episodes of several agents. A group of n rollouts plays n / len(roles) episodes side by side; each agent of each
    is one rollout with one trainable trace, and is compared with those of its role alone.

    A role in `frozen` plays, on the current policy, and does not train; neither does one whose `Result` says so, for this
    episode. An opponent outside the policy is a service: `await self.ask("opponent", messages)`.

    An episode that fails costs its own rollouts, not those of the group's other episodes.
    """

    all_or_nothing = False
    roles: Sequence[str] = ()
    frozen: ClassVar[Sequence[str]] = ()

    async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Mapping[str, Ended]:
        """Play one episode; a `Result` for every role, or the exception that only its rollout ends with."""
        raise NotImplementedError(f"{type(self).__name__} must define episode(task, seats)")

    async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Ended]:
        roles = list(self.roles)
        if not roles or len(seats) % len(roles):
            raise EnvError(
                f"a group of {len(seats)} rollouts cannot be dealt to {len(roles)} roles ({', '.join(roles)}): "
                f"set group_size to a multiple of {len(roles)}"
            )
        ordered = sorted(seats, key=lambda seat: seat.member)
        tables = []
        for first in range(0, len(ordered), len(roles)):
            table = dict(zip(roles, ordered[first : first + len(roles)], strict=True))
            for role, seat in table.items():
                seat.role = role
            tables.append(table)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._play(task, table)) for table in tables]
        by_member = {member: ended for played in tasks for member, ended in played.result().items()}
        return [by_member[seat.member] for seat in seats]

    async def _play(self, task: Task, table: Mapping[str, Seat]) -> dict[int, Ended]:
        ended: Mapping[str, Ended]
        try:
            ended = await _awaited("episode", self.episode(task, table))
            if not isinstance(ended, Mapping):
                raise EnvError(
                    f"episode() returned {type(ended).__name__}; expected a mapping with a Result for each role"
                )
            if missing := [role for role in table if role not in ended]:
                raise EnvError(f"episode() returned no Result for {', '.join(missing)}")
        except (
            Exception
        ) as error:  # whatever an episode of anybody's raises: the others are still being played
            ended = dict.fromkeys(table, error)
        return {seat.member: self._as(role, ended[role]) for role, seat in table.items()}

    def _as(self, role: str, ended: Ended) -> Ended:
        if not isinstance(ended, Result):
            return ended
        return msgspec.structs.replace(ended, role=role, trains=ended.trains and role not in self.frozen)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        return None


_MOST_BROKEN = 1000
"""Groups without one of their members that are remembered for the others: those that were cancelled too never come."""


class _Parties:
    """The groups whose members are on their way to their shared call, by group and attempt."""

    def __init__(self) -> None:
        self._parties: dict[tuple[int, int], _Party] = {}
        self._broken: deque[tuple[int, int]] = deque()

    def joined(self, key: tuple[int, int], size: int) -> _Party:
        """The one that a member of this group joins next; it is forgotten with its last."""
        party = self._parties.setdefault(key, _Party(size))
        if party.missing == 1:
            del self._parties[key]
        return party

    def broke(self, key: tuple[int, int]) -> None:
        """Its call will not be: tell those who still come."""
        self._broken.append(key)
        if len(self._broken) > _MOST_BROKEN:
            self._parties.pop(self._broken.popleft(), None)


class _Party:
    """The members of one group, on their way to their shared call."""

    def __init__(self, size: int) -> None:
        self.missing = size
        self.seats: list[Seat] = []
        self.waits: list[asyncio.Future[Result]] = []
        self.call: asyncio.Task[Any] | None = None
        self.is_broken = False

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.is_broken

    def join(self, seat: Seat) -> asyncio.Future[Result]:
        mine: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.missing -= 1
        if self.is_broken:
            _settle(mine, _broken())
            return mine
        self.seats.append(seat)
        self.waits.append(mine)
        return mine

    def fail(self, error: BaseException) -> None:
        for waits in self.waits:
            _settle(waits, error)

    async def end(self) -> None:
        """Stop the shared call, and wait until it has stopped. Members that are still to come find no company."""
        if self.call is None:
            self.is_broken = True
            self.fail(_broken())
            self.seats, self.waits = [], []
        elif not self.call.done():
            self.call.cancel()
            await asyncio.wait((self.call,))


def _broken() -> EnvError:
    return EnvError("a member of its group was cancelled before all were there")


async def _awaited(name: str, made: Any) -> Any:
    """What a method of the environment's returns that must be async, since it waits for models."""
    if not inspect.isawaitable(made):
        raise EnvError(
            f"{name}() is a plain function, which cannot wait for a model: write `async def {name}(...)`"
        )
    return await made


def _settle(waits: asyncio.Future[Result], ended: Result | BaseException) -> None:
    """Let a member have what came of its part; one that is gone needs nothing."""
    if waits.done():
        return
    if isinstance(ended, asyncio.CancelledError):
        waits.cancel()
    elif isinstance(ended, BaseException):
        waits.set_exception(ended)
        waits.exception()  # one that nobody waits for any more is no reason for a warning
    else:
        waits.set_result(ended)
