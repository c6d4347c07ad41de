"""Which files of the rollout store may go: by policy, and never one that recovery could still ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.journal.files import file_numbers, file_path, first_seq_of


class Needed:
    """Rollouts whose tokens the run may still need: those in flight, of groups that have no verdicts, in the batch
    list, or in a batch that was not shipped.

    A fold over the journal. It looks at no checkpoint, though some hold tokens too: one that cannot be read is no loss.
    """

    def __init__(self) -> None:
        self._since: dict[RolloutId, int] = {}
        """The record it was started by, in order; 0 where an earlier life did."""
        self._shipping: dict[int, tuple[RolloutId, ...]] = {}

    @property
    def since(self) -> int | None:
        """No record before this one tells of a rollout that is needed; None while none is."""
        return next(iter(self._since.values()), None)

    def add(self, rollouts: Iterable[RolloutId], shipping: Mapping[int, tuple[RolloutId, ...]]) -> None:
        """What an earlier life left, beside batches that it cut and did not ship. Call before the first record."""
        self._shipping.update(shipping)
        self._since.update(dict.fromkeys((*rollouts, *chain.from_iterable(shipping.values())), 0))

    def see(self, seq: int, event: Event, commands: Sequence[Command]) -> None:
        """Take in one record."""
        match event:
            case on.RolloutEnded(rollout=rollout) if rollout.task.split == "eval":
                self._settled(rollout.id)
            case on.GroupProcessed(result=result):
                self._settled(*[verdict.rollout for verdict in result.verdicts if verdict.fate != "queued"])
            case on.BatchShipped(step=step):
                self._settled(*self._shipping.pop(step, ()))
            case _:
                pass
        for command in commands:
            self._commanded(seq, command)

    def _commanded(self, seq: int, command: Command) -> None:
        match command:
            case do.StartRollout(rollout=rollout):
                self._since[rollout] = seq
                if rollout.attempt:  # the one before was no last one after all
                    self._settled(rollout._replace(attempt=rollout.attempt - 1))
            case do.ShipBatch(batch=batch):
                self._shipping[batch.step] = batch.rollouts
            case do.NoteStale(action="dropped", rollout=rollout) | do.NoteDiscarded(rollout=rollout):
                self._settled(rollout)
            case do.FinishRun(status="done"):
                self._since.clear()
            case _:
                pass

    def _settled(self, *rollouts: RolloutId) -> None:
        for rollout in rollouts:
            self._since.pop(rollout, None)


class Retention:
    """Drops the oldest files of a run's rollout store. For one thread."""

    def __init__(self, run_dir: Path, *, steps: int | None, nbytes: int | None) -> None:
        """`steps`: rollouts go that ended before the last so many batches were cut. `nbytes`: the oldest go while the
        store is larger. None sets no limit."""
        self._run_dir = run_dir
        self._steps = steps
        self._nbytes = nbytes
        self._cuts: deque[int] = deque(maxlen=None if steps is None else steps + 1)
        """Records that cut the last batches."""
        self._firsts: dict[int, int] = {}
        """Number of a file -> its first record."""
        self._is_due = True
        self._begun = 0
        self.needed = Needed()

    def see(self, seq: int, event: Event, commands: Sequence[Command]) -> None:
        """Take in one record; it is durable."""
        self.needed.see(seq, event, commands)
        self._is_due |= type(event) is on.BatchShipped
        if self._steps is not None:
            self._cuts.extend(seq for command in commands if type(command) is do.ShipBatch)

    def drop_if_due(self, begun: int) -> None:
        """`drop` where something may have changed: a batch was shipped, or another file of the store `begun`."""
        if self._is_due or begun != self._begun:
            self._is_due, self._begun = False, begun
            self.drop()

    def drop(self) -> list[Path]:
        """Remove what may go; returns it. Whole files, oldest first, and never the one that is written. OSError."""
        old = self._cuts[0] if self._steps is not None and len(self._cuts) > self._steps else 0
        needed = self.needed.since
        files = [(number, first) for number in self._numbers() if (first := self._first(number)) is not None]
        sizes = {number: self._path(number).stat().st_size for number, _ in files}
        size = sum(sizes.values())
        dropped = []
        for (number, _), (_, end) in pairwise(
            files
        ):  # all records of a file are before the first of the next
            too_much = self._nbytes is not None and size > self._nbytes
            if not (end <= old or too_much) or (needed is not None and end > needed):
                break
            self._path(number).unlink()
            size -= sizes[number]
            self._firsts.pop(number)
            dropped.append(self._path(number))
        return dropped

    def _numbers(self) -> list[int]:
        return file_numbers(self._run_dir, "rollouts")

    def _path(self, number: int) -> Path:
        return file_path(self._run_dir, "rollouts", number)

    def _first(self, number: int) -> int | None:
        if (first := self._firsts.get(number)) is None:
            first = first_seq_of(self._run_dir, "rollouts", number)
            if first is not None:
                self._firsts[number] = first
        return first
