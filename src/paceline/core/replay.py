"""A journal against the core: the recorded events are decided again, and the commands compared.

    report = replay(source, make, written)
    report.divergence      # the first command that differs, or None

    journal ──▶ record ──▶ Core.handle(event, at) ──▶ commands   ═?═   the record's commands

Each life of a run begins as it did: a fresh core, or one restored from its checkpoint and the records behind it. The
checkpoint need not be on disk: the core that decides again makes it again, where the first did. What `docs/recovery.md`
calls recovered is folded, not decided, so a life is compared from its `RunOpened` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from paceline.core.rebuild import Extras
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample
from paceline.errors import CannotFold, PacelineError, said_by

_CHECKPOINTS = 4
"""Newest states kept: a run goes on from its newest one that can be read."""


class Recorded(Protocol):
    """One record of a journal."""

    @property
    def seq(self) -> int: ...
    @property
    def at(self) -> float: ...
    @property
    def event(self) -> Event: ...
    @property
    def commands(self) -> tuple[Command, ...]: ...


class Recording(Protocol):
    """A recorded run."""

    def records(self, since: int) -> Iterator[Recorded]:
        """In order, from that number on."""
        ...

    def stored(
        self, wanted: frozenset[RolloutId], since: int
    ) -> tuple[Mapping[RolloutId, Rollout], Mapping[RolloutId, Extras]]:
        """Rollouts with their tokens, and what their samples carry; those that are there. None ended in a record before
        `since`."""
        ...

    def checkpoint(self, seq: int) -> dict[str, Any] | None:
        """The state that holds all records before `seq`; None when it is kept no more."""
        ...


class Divergence(NamedTuple):
    """The first thing that is decided otherwise than it was."""

    seq: int
    at: float
    event: Event
    number: int
    """Of the command among those of the record, from 0."""
    expected: Command | None
    """As recorded; None where there was none."""
    found: Command | None
    """As decided now; None where there is none."""
    error: str | None = None
    """What the core said, when it refuses an event that it took."""


class Skipped(NamedTuple):
    """Records that could not be decided again."""

    first: int
    records: int
    why: str


class Report(NamedTuple):
    """What came of it."""

    records: int
    """Decided again, and compared."""
    lives: int
    """That these records are of."""
    skipped: tuple[Skipped, ...]
    divergence: Divergence | None


def replay(
    recording: Recording,
    make: Callable[[on.RunOpened], Core],
    written: Callable[[Event | Command], Any],
    group_sizes: Mapping[str, int] | None = None,
) -> Report:
    """Decide again, up to the first divergence.

    `make` gives a new core, for a life that begins so; NotCovered if it cannot. `written` gives the form in which commands are
    compared. `group_sizes` is for journals that do not say how large a group is.
    """
    return _Replay(recording, make, written, group_sizes or {}).run()


class _Replay:
    def __init__(
        self,
        recording: Recording,
        make: Callable[[on.RunOpened], Core],
        written: Callable[[Event | Command], Any],
        group_sizes: Mapping[str, int],
    ) -> None:
        self._recording = recording
        self._make = make
        self._written = written
        self._sizes = group_sizes
        self._core: Core | None = None
        self._states: dict[int, dict[str, Any]] = {}
        self._compared = self._lives = 0
        self._skipped: list[Skipped] = []
        self._refused: Divergence | None = None
        """The last record, if the core refuses it: then the run must have ended with it."""

    def run(self) -> Report:
        for record in self._recording.records(0):
            if (found := self._take(record)) is not None:
                return self._report(found)
        return self._report(None)

    def _report(self, divergence: Divergence | None) -> Report:
        return Report(self._compared, self._lives, tuple(self._skipped), divergence)

    def _take(self, record: Recorded) -> Divergence | None:
        event = record.event
        if type(event) is on.RunFailed:  # not for the core
            self._refused, self._core = None, None
            return None
        if type(event) is on.RunOpened:
            self._refused, self._core = None, None
            try:
                self._core = self._begin(record.seq, event)
                self._lives += 1
            except NotCovered as why:
                self._skipped.append(Skipped(record.seq, 0, str(why)))
        if self._refused is not None:
            return self._refused
        if self._core is None:
            self._skip(record.seq)
            return None
        return self._decide(self._core, record)

    def _skip(self, seq: int) -> None:
        if not self._skipped:
            self._skipped.append(Skipped(seq, 0, "the beginning of this life is not in the journal"))
        last = self._skipped[-1]
        self._skipped[-1] = last._replace(records=last.records + 1)

    # ── the beginning of a life ──

    def _begin(self, seq: int, event: on.RunOpened) -> Core:
        core = self._make(event)
        if event.resumed_from is not None:
            if event.trained is None:
                raise NotCovered("the journal does not say from which step its trainer went on")
            state, rollouts = self._state(seq, event)
            core.restore(state, event.trained, event.weights, rollouts)
        core.count_from(seq)
        return core

    def _state(
        self, seq: int, event: on.RunOpened
    ) -> tuple[dict[str, Any], Mapping[RolloutId, Rollout] | None]:
        base = self._states.get(event.checkpoint) if event.checkpoint else EMPTY
        base = base or self._recording.checkpoint(event.checkpoint)
        if base is None:
            raise NotCovered(
                f"it went on from a checkpoint before record {event.checkpoint}, which is gone, and the records that "
                "led to it were not decided again"
            )
        if not event.recovered:
            return base, None
        recovery = Recovery(base, self._sizes)
        try:
            for record in self._recording.records(event.checkpoint):
                if record.seq >= seq:
                    break
                recovery.apply(record.seq, record.at, record.event, record.commands)
            wanted = recovery.wanted()
            rollouts, extras = self._recording.stored(wanted, recovery.since)
            if missing := wanted - rollouts.keys():
                raise NotCovered(
                    f"{len(missing)} rollouts it needs are not in the store, {min(missing)} is one"
                )
            return recovery.state(rollouts, extras), rollouts
        except CannotFold as why:
            raise NotCovered(str(why)) from why

    # ── one record ──

    def _decide(self, core: Core, record: Recorded) -> Divergence | None:
        event = record.event
        self._compared += 1
        try:
            found = core.handle(_whole(event), record.at)
        except Exception as error:  # whatever it is: the first core would have ended the run with it, too
            expected = record.commands[0] if record.commands else None
            refused = Divergence(record.seq, record.at, event, 0, expected, None, said_by(error))
            if record.commands:
                return refused
            self._refused = refused
            return None
        for number in range(max(len(found), len(record.commands))):
            then = record.commands[number] if number < len(record.commands) else None
            now = found[number] if number < len(found) else None
            if then is None or now is None or not self._same(then, now):
                return Divergence(record.seq, record.at, event, number, then, now)
        for command in found:
            if type(command) is do.SaveCheckpoint:
                self._keep(command.state)
        return None

    def _same(self, then: Command, now: Command) -> bool:
        if type(then) is not type(now):
            return False
        a, b = self._written(then), self._written(now)
        # As bytes, too: a reward may be NaN, which equals nothing.
        return bool(a == b) or msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)

    def _keep(self, state: dict[str, Any]) -> None:
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False)
        self._states[read["seq"]] = read
        for old in sorted(self._states)[:-_CHECKPOINTS]:
            del self._states[old]


class NotCovered(PacelineError):
    """A life that cannot begin again."""


def _whole(event: Event) -> Event:
    """Samples come from the log without arrays. Which tokens are trainable is asked for when stale ones are masked: how
    many there are is known, and where they are decides nothing."""
    if type(event) is not on.GroupProcessed:
        return event
    verdicts = tuple(
        [
            msgspec.structs.replace(verdict, samples=tuple(map(_with_mask, verdict.samples)))
            for verdict in event.result.verdicts
        ]
    )
    return msgspec.structs.replace(event, result=msgspec.structs.replace(event.result, verdicts=verdicts))


def _with_mask(sample: Sample) -> Sample:
    trainable = np.arange(sample.tokens) < sample.trainable_tokens
    trainable.setflags(write=False)
    return msgspec.structs.replace(sample, trainable=trainable)
