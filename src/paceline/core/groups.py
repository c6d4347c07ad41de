"""When a group closes: the ledger of who has ended and who has not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from paceline.domain.commands import PutOff
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EngineId, GroupId, RolloutId, parse_rollout_id
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError

M = TypeVar("M")


class GroupState(Generic[M]):
    """What is known of a group that has no verdicts yet. `M` is what it keeps of a member's attempt: its record in the
    core, its id where a journal is folded."""

    __slots__ = (
        "arrived",
        "closed_unlaunched",
        "excused",
        "fallback",
        "id",
        "launched",
        "left",
        "needs",
        "places",
        "put_off",
        "references",
        "rest",
        "retries",
        "seed",
        "since",
        "size",
        "step",
        "task",
        "tokens",
    )

    def __init__(self, group: GroupId, task: TaskRef, size: int, seed: int, since: int = 0) -> None:
        self.id = group
        self.task = task
        self.size = size
        self.seed = seed
        self.since = since
        """Number of the journal record that opened it: none of its rollouts ended before."""
        self.launched = 0
        """Members started at least once, in order of their number."""
        self.retries: deque[M] = deque()
        """Attempts that failed and wait for a permit to be tried again."""
        self.arrived: list[M] = []
        """Last attempts that have ended."""
        self.closed_unlaunched = 0
        """Members that will never be started."""
        self.left = 0
        """Members that left it for a group of their own (`SplitGroup`)."""
        self.rest: GroupId | None = None
        """That group; None when nobody left."""
        self.needs = size
        """Members that make it whole; fewer than `size` where they race."""
        self.step = 0
        """The step being collected when it was opened."""
        self.references: tuple[float, ...] = ()
        """What its members are compared with instead of each other: rewards of siblings that ended before."""
        self.fallback: float | None = None
        """What one is compared with that ends alone, its siblings being put off."""
        self.put_off: PutOff | None = None
        """What it was opened from, if not from a task that was drawn."""
        self.places = 0
        """Places in batches to come that it holds (`Pacing`)."""
        self.tokens: dict[RolloutId, int] = {}
        """Sampled tokens of each attempt in `arrived` and `retries`, as the engine requests reported them."""
        self.excused: dict[tuple[GroupId, int], int] = {}
        """Of members, by the group they were started in and their number: attempts that the end of the orchestrator cut
        off, which are none of theirs."""

    def excuse(self, rollout: RolloutId) -> None:
        """An attempt was cut off by the end of the orchestrator, and is tried again."""
        member = rollout[:2]
        self.excused[member] = self.excused.get(member, 0) + 1

    def attempts_of(self, rollout: RolloutId) -> int:
        """Attempts at a member up to this one that count against its limit."""
        return rollout.attempt + 1 - self.excused.get(rollout[:2], 0)

    def plain(self, id_of: Callable[[M], RolloutId]) -> dict[str, Any]:
        """For a checkpoint; `restore` reads it."""
        return {
            "id": self.id,
            "task": [*msgspec.structs.astuple(self.task)],
            "size": self.size,
            "seed": self.seed,
            "since": self.since,
            "launched": self.launched,
            "unlaunched": self.closed_unlaunched,
            "retries": [str(id_of(each)) for each in self.retries],
            "arrived": [str(id_of(each)) for each in self.arrived],
            "tokens": {str(rollout): tokens for rollout, tokens in self.tokens.items()},
            "needs": self.needs,
            "places": self.places,
            "left": self.left,
            "rest": self.rest,
            "step": self.step,
            "put_off": None if self.put_off is None else msgspec.to_builtins(self.put_off),
            "references": list(self.references),
            "fallback": self.fallback,
            "excused": [[*member, count] for member, count in self.excused.items()],
        }

    @classmethod
    def restore(cls, plain: Mapping[str, Any], member: Callable[[RolloutId], M]) -> Self:
        """The inverse of `plain`; `member` is the inverse of its `id_of`."""
        group = cls(plain["id"], TaskRef(*plain["task"]), plain["size"], plain["seed"], plain["since"])
        group.launched = plain["launched"]
        group.closed_unlaunched = plain["unlaunched"]
        group.retries.extend(member(parse_rollout_id(name)) for name in plain["retries"])
        group.arrived = [member(parse_rollout_id(name)) for name in plain["arrived"]]
        group.tokens = {parse_rollout_id(name): tokens for name, tokens in plain["tokens"].items()}
        group.needs, group.places = plain["needs"], plain["places"]
        group.left, group.rest, group.step = plain["left"], plain.get("rest"), plain["step"]
        if plain["put_off"] is not None:
            group.put_off = msgspec.convert(plain["put_off"], PutOff)
            group.references = group.put_off.references
        group.references = tuple(plain.get("references", group.references))
        group.fallback = plain.get("fallback")
        group.excused = {(number, member): count for number, member, count in plain.get("excused", ())}
        return group


class OpenGroup(GroupState[Rollout]):
    """A group with members that have not ended."""

    __slots__ = ("engine",)

    def __init__(self, group: GroupId, task: TaskRef, size: int, seed: int, since: int = 0) -> None:
        super().__init__(group, task, size, seed, since)
        self.engine: EngineId | None = None
        """Where its first member went; the others prefer it."""

    @property
    def owes_launches(self) -> bool:
        return bool(self.retries) or self.launched + self.closed_unlaunched < self.size

    @property
    def unlaunched(self) -> int:
        return self.size - self.launched - self.closed_unlaunched

    @property
    def owed(self) -> int:
        """Members that have not ended their last attempt."""
        return self.size - self.closed_unlaunched - self.left - len(self.arrived)

    @property
    def awaits_one(self) -> bool:
        """Whether the next end of a last attempt closes it."""
        return self.owed == 1

    def next_member(self) -> RolloutId:
        """The attempt to start next: a retry first, it has waited longest."""
        if self.retries:
            failed = self.retries.popleft().id
            self.tokens.pop(failed, None)
            return failed._replace(attempt=failed.attempt + 1)
        member = self.launched
        self.launched += 1
        return RolloutId(self.id, member)


class GroupLedger:
    """Accounts for every member of every open group exactly once: ended, or never to be launched.

    A member that is neither would keep its group open until the run ends.
    """

    __slots__ = ("_moved", "_open")

    def __init__(self) -> None:
        self._open: dict[GroupId, OpenGroup] = {}
        self._moved: dict[tuple[GroupId, int], GroupId] = {}
        """Members that left the group they were started for, and where they went."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, group: GroupId) -> bool:
        return group in self._open

    def __getitem__(self, group: GroupId) -> OpenGroup:
        try:
            return self._open[group]
        except KeyError:
            raise InvariantError(f"group {group} is not open: it closed, or was never opened") from None

    def of(self, rollout: RolloutId) -> OpenGroup:
        """The group a rollout is a member of now."""
        if self._moved:
            return self[self._moved.get((rollout.group, rollout.member), rollout.group)]
        return self[rollout.group]

    def has(self, rollout: RolloutId) -> bool:
        """Whether the group that a rollout is a member of now is open."""
        return self._moved.get((rollout.group, rollout.member), rollout.group) in self._open

    def moved(self) -> list[list[int]]:
        """Members that left the group they were started for: group, member, and where they are now."""
        return [[group, member, rest] for (group, member), rest in self._moved.items()]

    def restore_moved(self, rows: Iterable[Sequence[int]]) -> None:
        self._moved = {(group, member): rest for group, member, rest in rows}

    def groups(self) -> list[OpenGroup]:
        """Every open group, oldest first."""
        return list(self._open.values())

    def open(self, group: GroupId, task: TaskRef, size: int, seed: int, since: int = 0) -> OpenGroup:
        """Begin to account for a group, opened by the journal's record `since`."""
        if group in self._open:
            raise InvariantError(f"group {group} is open already, for task {self._open[group].task}")
        opened = self._open[group] = OpenGroup(group, task, size, seed, since)
        return opened

    def take(self, group: OpenGroup) -> OpenGroup:
        """Go on with a group of an earlier life."""
        self._open[group.id] = group
        return group

    def settle(self, rollout: Rollout) -> ClosedGroup | None:
        """The last attempt of a member has ended; the closed group once nobody is owed."""
        group = self.of(rollout.id)
        group.arrived.append(rollout)
        return self._close_if_whole(group)

    def split(self, group_id: GroupId, rest: GroupId, rollouts: Sequence[RolloutId]) -> ClosedGroup | None:
        """Members that run go on as the group `rest`; the group they leave, if that closed it."""
        group = self[group_id]
        opened = self.open(rest, group.task, len(rollouts), group.seed, group.since)
        opened.launched = len(rollouts)
        opened.engine, opened.step = group.engine, group.step
        opened.excused = dict(group.excused)
        for rollout in rollouts:
            self._moved[rollout.group, rollout.member] = rest
        group.left, group.rest = group.left + len(rollouts), rest
        return self._close_if_whole(group)

    def give_up_unlaunched(self, group_id: GroupId) -> tuple[int, ClosedGroup | None]:
        """Members not started by now never will be: how many, and the group if that closed it.

        A retry that is given up settles its member with the attempt that failed.
        """
        group = self[group_id]
        group.arrived.extend(group.retries)
        group.retries.clear()
        given_up = group.unlaunched
        group.closed_unlaunched += given_up
        return given_up, self._close_if_whole(group)

    def _close_if_whole(self, group: OpenGroup) -> ClosedGroup | None:
        if group.owed < 0:
            raise InvariantError(f"group {group.id} of {group.size} settled {-group.owed} members too many")
        if group.owed:
            return None
        del self._open[group.id]
        if self._moved:
            for rollout in group.arrived:
                self._moved.pop((rollout.id.group, rollout.id.member), None)
        needs = 0 if group.needs == group.size else group.needs
        return ClosedGroup(
            group.id, group.task, group.size, tuple(group.arrived), needs, group.references, group.fallback
        )
