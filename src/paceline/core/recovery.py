"""A run's state from its journal: a fold over what happened and what was commanded, which decides nothing.

    recovery = Recovery(checkpoint, group_sizes)
    for seq, at, event, commands in records_behind(checkpoint["seq"]):
        recovery.apply(seq, at, event, commands)
    rollouts = read(recovery.wanted(), recovery.since)          # from the rollout store
    core.restore(recovery.state(rollouts), trained, path, rollouts)

So it does not matter which code or config made the decisions. `docs/recovery.md` says what a run loses and what not.
What was drawn is folded in `recovery_draws`, and what waits for its batch in `recovery_list`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from paceline.core.accounting import Account, StreamAccount
from paceline.core.groups import GroupState
from paceline.core.pacing import Pacing
from paceline.core.parts import UnderWay
from paceline.core.rebuild import Extras
from paceline.core.recovery_draws import RecoveredDraws
from paceline.core.recovery_list import RecoveredList
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.errors import CannotFold

EMPTY: dict[str, Any] = {
    "seq": 0,
    "cut": 0,
    "next_group": 0,
    "curriculum": {"draws": 0, "envs": {}},
    "groups": [],
    "processing": [],
    "flights": [],
    "shipping": [],
    "list": [],
    "pacing": {},
    "plan": {},
    "account": [],
    "admission": {},
    "placement": {},
    "scheduling": {},
    "kept": [],
    "put_offs": 0,
    "moved": [],
}
"""The state before the first record."""


_Group: TypeAlias = GroupState[RolloutId]
"""A group that is open, or closed and being processed."""


class Recovery:
    """State after the records so far. Begins with a checkpoint of the core, or with `EMPTY`."""

    def __init__(self, state: Mapping[str, Any], group_sizes: Mapping[EnvName, int] | None = None) -> None:
        """`group_sizes`: for journals that do not say how large a group is."""
        self._sizes = group_sizes or {}
        self.base: int = state["seq"]
        """Number of the first record that the checkpoint does not hold."""
        self.seq: int = state["seq"]
        """Number of the first record that was not taken in."""
        self._at = 0.0
        self.cut: int = state["cut"]
        self._next_group: int = state["next_group"]
        self._draws = RecoveredDraws(state["curriculum"])
        self._groups = {g["id"]: _Group.restore(g, _same) for g in state["groups"]}
        self._processing = {g["id"]: _Group.restore(g, _same) for g in state["processing"]}
        self._flights: dict[RolloutId, UnderWay] = {}
        for row in state["flights"]:
            flight = UnderWay.restore(row)
            self._flights[flight.id] = flight
        self._pacing = Pacing(0, None, None, 1)
        self._pacing.restore(state["pacing"])
        self._plan: dict[EnvName, int] = dict(state["plan"])
        self._account = Account()
        self._account.restore(state["account"])
        self._list = RecoveredList(state["list"], self._account)
        self._admission: dict[str, Any] = dict(state["admission"])
        self._placement: dict[str, Any] = dict(state.get("placement", {}))
        self._scheduling: dict[str, Any] = dict(state["scheduling"])
        self._kept = {each["number"]: msgspec.convert(each, do.PutOff) for each in state["kept"]}
        self._put_offs: int = state["put_offs"]
        self._closed_kept: do.PutOff | None = None
        """What the group was opened from that was processed last."""
        self._moved: dict[tuple[GroupId, int], GroupId] = {
            (group, member): rest for group, member, rest in state["moved"]
        }
        self._handlers: dict[type, Callable[[Any], None]] = {
            on.RunOpened: self._opened,
            on.SegmentEnded: self._segment_ended,
            on.RolloutContinued: self._continued,
            on.GroupProcessed: self._processed,
            on.BatchShipped: self._shipped,
            do.NoteOpened: self._note_opened,
            do.NoteRedraw: self._begins_again,
            do.StartRollout: self._start,
            do.ContinueRollout: self._goes_on,
            do.ProcessGroup: self._process,
            do.ShipBatch: self._ship,
            do.NoteRetry: self._retried,
            do.NoteStale: self._list.stale,
            do.NoteDiscarded: self._list.discarded,
            do.PutOff: self._put_off,
            do.SplitGroup: self._split,
            do.NoteLate: self._late,
            do.NoteReferences: self._compared,
            do.ReportEval: self._evaluated,
            do.SkipTask: self._draws.skipped,
            do.NoteQuarantine: self._draws.quarantined,
        }

    # ── taking in records ──

    def apply(self, seq: int, at: float, event: Event, commands: Sequence[Command]) -> None:
        """One record: when, what happened, then what was commanded. CannotFold where the journal does not say enough."""
        self.seq = seq
        self._at = at
        handlers = self._handlers
        if type(event) is on.RolloutEnded:
            retried = [c.rollout for c in commands if type(c) is do.NoteRetry]
            if event.rollout.outcome.cause == "restart":
                for rollout in retried:
                    self._excuse(rollout)
            self._ended(event.rollout, event.rollout.id in retried)
        elif handler := handlers.get(type(event)):
            handler(event)
        for command in commands:
            if handler := handlers.get(type(command)):
                handler(command)
        self.seq = seq + 1

    def _opened(self, event: on.RunOpened) -> None:
        self._draws.forgive(event.forgives)
        for rollout in event.continues:
            self._flights[rollout].stood.begin(self._at)
        if not event.recovered and self.seq > 0:
            raise CannotFold(
                f"record {self.seq} begins a life of the run that went on from a checkpoint alone, and there is no "
                "later checkpoint"
            )

    def _start(self, command: do.StartRollout) -> None:
        rollout, task = command.rollout, command.task
        self._flights[rollout] = UnderWay(rollout, task, started=self._at)
        self._account.launched(self._account_of(task))
        if task.split != "train":
            self._next_group = max(self._next_group, rollout.group + 1)
            return
        group = self._group_of(rollout)
        if group is None:
            size = command.group_size or self._sizes.get(task.env, 0)
            if not size:
                raise CannotFold(f"the journal does not say how large the groups of env {task.env!r} were")
            group = self._open(
                rollout.group, task, size, command.group_seed, command.group_needs, command.put_off
            )
        if not rollout.attempt:
            group.launched = rollout.member + 1
            return
        before = rollout._replace(attempt=rollout.attempt - 1)
        if before in group.retries:
            group.retries.remove(before)
            group.tokens.pop(before, None)
        elif (
            before in group.arrived
        ):  # a journal without `NoteRetry`: only now is it known that it was no last one
            group.arrived.remove(before)
            self._account_of(task).move("grouped", "failed", group.tokens.pop(before))

    def _goes_on(self, command: do.ContinueRollout) -> None:
        self._flights[command.rollout].stood.end(self._at)

    def _note_opened(self, command: do.NoteOpened) -> None:
        self._open(
            command.group, command.task, command.size, command.group_seed, command.needs, command.put_off
        )

    def _open(self, number: GroupId, task: TaskRef, size: int, seed: int, needs: int, put_off: int) -> _Group:
        """`needs` 0: all of its members."""
        self._next_group = max(self._next_group, number + 1)
        group = self._groups[number] = _Group(number, task, size, seed, self.seq)
        group.needs = group.places = needs or size
        group.step = self.cut + 1
        if put_off:
            group.put_off = self._kept.pop(put_off)
            group.references = group.put_off.references
        else:
            self._draws.drawn(task)
        return group

    def _segment_ended(self, event: on.SegmentEnded) -> None:
        if (flight := self._flights.get(event.rollout)) is None or not event.versions:
            return
        tokens = sum([count for _, count in event.versions])
        flight.sampled += tokens
        flight.requests += tokens > 0
        self._account.sampled(self._account_of(flight.task), tokens)
        if flight.task.split == "train":
            oldest = min([version for version, _ in event.versions])
            flight.oldest = oldest if flight.oldest is None else min(flight.oldest, oldest)

    def _continued(self, event: on.RolloutContinued) -> None:
        flight = self._flights[event.rollout]
        account = self._account_of(flight.task)
        account.move("in_flight", "failed", event.lost, rollouts=0)
        flight.sampled, flight.oldest = event.tokens, event.oldest

    def _ended(self, rollout: Rollout, again: bool) -> None:
        if (flight := self._flights.pop(rollout.id, None)) is None:
            return
        task, sampled = flight.task, flight.sampled
        account = self._account_of(task)
        if task.split == "eval":
            account.move("in_flight", "eval", sampled)
            return
        group = self._group_of(rollout.id)
        if group is None:
            account.move("in_flight", "failed", sampled)
        elif again:
            account.move("in_flight", "failed", sampled)
            group.tokens[rollout.id] = sampled
            group.retries.append(rollout.id)
        else:
            account.move("in_flight", "grouped", sampled)
            group.arrived.append(rollout.id)
            group.tokens[rollout.id] = sampled
            if rollout.outcome.cause == "deferred" and rollout.outcome.ending == "cancelled":
                group.places -= 1

    def _excuse(self, rollout: RolloutId) -> None:
        if (group := self._group_of(rollout)) is not None:
            group.excuse(rollout)

    def _retried(self, command: do.NoteRetry) -> None:
        """A member that had ended, and is tried again with the others of a group that runs in one call."""
        group = self._group_of(command.rollout)
        if group is not None and command.rollout in group.arrived:
            group.arrived.remove(command.rollout)
            group.retries.append(command.rollout)
            account = self._account_of(group.task)
            account.move("grouped", "failed", group.tokens[command.rollout])

    def _process(self, command: do.ProcessGroup) -> None:
        closed = command.group
        if (group := self._groups.pop(closed.id, None)) is None:
            # Given up before one of its members had started, and earlier releases did not tell of it until then.
            group = _Group(closed.id, closed.task, closed.size, 0, self.seq)
            self._next_group = max(self._next_group, closed.id + 1)
            self._draws.drawn(closed.task)
        group.references, group.fallback = command.group.references, command.group.fallback
        for rollout in group.retries:  # given up: its last attempt settles the member, as failed as it was
            group.arrived.append(rollout)
            tokens = group.tokens.setdefault(rollout, 0)
            self._account_of(group.task).move("failed", "grouped", tokens)
        group.retries.clear()
        group.closed_unlaunched = group.size - len(group.arrived) - group.left
        group.places -= min(group.closed_unlaunched, group.places)
        for rollout in group.arrived:
            self._moved.pop((rollout.group, rollout.member), None)
        self._processing[group.id] = group

    def _processed(self, event: on.GroupProcessed) -> None:
        result = event.result
        if (group := self._processing.pop(result.group, None)) is None:
            return
        account = self._account_of(group.task)
        for verdict in result.verdicts:
            sampled = group.tokens.pop(verdict.rollout)
            account.move("grouped", verdict.fate, sampled)
            if verdict.fate == "queued":
                ships = sum([sample.trainable_tokens for sample in verdict.samples])
                account.move("queued", "overlong", sampled - ships, rollouts=0)
                self._list.queued(verdict.rollout, group.task.env, verdict.samples, group.since)
        if group.put_off is not None:
            self._closed_kept = group.put_off

    def _begins_again(self, command: do.NoteRedraw) -> None:
        """Said of the group that has just been processed."""
        if not command.put_off:
            self._draws.again(command.task)
        elif (kept := self._closed_kept) is not None and kept.number == command.put_off:
            self._kept[kept.number] = kept

    def _ship(self, command: do.ShipBatch) -> None:
        batch = command.batch
        self.cut = batch.step
        self._list.cut(batch)
        self._pacing.shipped(len(batch.rollouts), batch.tokens)

    def _shipped(self, event: on.BatchShipped) -> None:
        self._list.shipped(event.step)

    def _put_off(self, command: do.PutOff) -> None:
        self._kept[command.number] = command
        self._put_offs = command.number

    def _split(self, command: do.SplitGroup) -> None:
        group = self._groups[command.group]
        count = len(command.rollouts)
        rest = _Group(command.rest, group.task, count, group.seed, group.since)
        rest.launched, rest.places, rest.step = count, 0, group.step
        rest.excused = dict(group.excused)
        self._groups[rest.id] = rest
        self._next_group = max(self._next_group, rest.id + 1)
        for rollout in command.rollouts:
            self._moved[rollout.group, rollout.member] = rest.id
        group.left, group.rest = group.left + count, rest.id
        group.places -= count

    def _late(self, command: do.NoteLate) -> None:
        self._flights[command.rollout].late = True

    def _compared(self, command: do.NoteReferences) -> None:
        self._groups[command.group].references = command.references

    def _group_of(self, rollout: RolloutId) -> _Group | None:
        """The group that a rollout is a member of now."""
        return self._groups.get(self._moved.get((rollout.group, rollout.member), rollout.group))

    def _evaluated(self, command: do.ReportEval) -> None:
        self._plan[command.env] = max(self._plan.get(command.env, -1), command.version)

    # ── what comes of it ──

    @property
    def under_way(self) -> list[UnderWay]:
        """Attempts that had not ended, in the order of their start."""
        return list(self._flights.values())

    def is_owed(self, rollout: RolloutId) -> bool:
        """Whether the group that a rollout is a member of is open."""
        return self._group_of(rollout) is not None

    @property
    def since(self) -> int:
        """No rollout that is wanted ended in a record before this one."""
        groups = [*self._groups.values(), *self._processing.values()]
        return min([self.seq, *[g.since for g in groups], *[since for _, since in self._list.needed()]])

    def wanted(self) -> frozenset[RolloutId]:
        """Rollouts whose records, tokens included, `state` and `owed` need."""
        found = [
            r for g in (*self._groups.values(), *self._processing.values()) for r in (*g.arrived, *g.retries)
        ]
        return frozenset([*found, *[rollout for rollout, _ in self._list.needed()]])

    def owed(
        self, rollouts: Mapping[RolloutId, Rollout], extras: Mapping[RolloutId, Extras]
    ) -> list[do.ProcessGroup | do.ShipBatch]:
        """What was commanded and not answered: to be carried out again, in this order."""
        commands: list[do.ProcessGroup | do.ShipBatch] = []
        for step in self._list.shipping:
            batch = self.batch(step, rollouts, extras)
            commands.append(do.ShipBatch(batch, "it was being shipped when the run ended"))
        for group in self._processing.values():
            closed = ClosedGroup(
                group.id,
                group.task,
                group.size,
                tuple([rollouts[r] for r in group.arrived]),
                0 if group.needs == group.size else group.needs,
                group.references,
                group.fallback,
            )
            commands.append(do.ProcessGroup(closed, "it was being processed when the run ended"))
        return commands

    def batch(
        self, step: int, rollouts: Mapping[RolloutId, Rollout], extras: Mapping[RolloutId, Extras]
    ) -> Batch:
        """One that was cut and not reported shipped. CannotFold as `state`."""
        return self._list.batch(step, rollouts, extras)

    def state(
        self, rollouts: Mapping[RolloutId, Rollout], extras: Mapping[RolloutId, Extras]
    ) -> dict[str, Any]:
        """What `Core.restore` takes. CannotFold names a rollout whose samples cannot be built again as they were."""
        return {
            "format": 2,
            "seq": self.seq,
            "cut": self.cut,
            "next_group": self._next_group,
            "curriculum": self._draws.plain(),
            "groups": [group.plain(_same) for group in self._groups.values()],
            "processing": [group.plain(_same) for group in self._processing.values()],
            "flights": [flight.plain() for flight in self._flights.values()],
            "shipping": self._list.shipping,
            "list": self._list.plain(rollouts, extras),
            "pacing": self._pacing.snapshot(),
            "plan": self._plan,
            "account": self._account.snapshot(),
            "admission": self._admission,
            "placement": self._placement,
            "scheduling": self._scheduling,
            "kept": [msgspec.to_builtins(each) for each in self._kept.values()],
            "put_offs": self._put_offs,
            "moved": [[group, member, rest] for (group, member), rest in self._moved.items()],
        }

    def _account_of(self, task: TaskRef) -> StreamAccount:
        return self._account.of(task.split, task.env)


def _same(rollout: RolloutId) -> RolloutId:
    """A fold keeps ids where the core keeps records."""
    return rollout
