"""`paceline replay RUN --batches`: every batch made again from the recorded rollouts. See `docs/recovery.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from paceline.cli.cores import config_at
from paceline.cli.replay import RecordedRun
from paceline.cli.rundir import config_file
from paceline.config import RunConfig
from paceline.core.packing import pack_as
from paceline.core.recovery import EMPTY, Recovery
from paceline.domain.batch import Batch
from paceline.domain.commands import ShipBatch
from paceline.domain.events import BatchShipped, RunOpened
from paceline.domain.ids import RolloutId
from paceline.errors import CannotFold
from paceline.journal import Record, read_journal
from paceline.journal.files import dropped_before
from paceline.journal.reader import TokenReader
from paceline.transport.encode import encode
from paceline.transport.filesystem import digest_of
from paceline.transport.layout import batch_dir, rank_file


class Differs(NamedTuple):
    """A rank's file that is not made again as it was."""

    step: int
    rank: int
    shipped: str
    """Hash of what was shipped, in hex, or of what the other run makes; empty where that had fewer ranks."""
    made: str
    """Of what is made now, of the first run where two are compared; empty where that has fewer ranks."""


class NotMade(NamedTuple):
    step: int
    why: str


class Remade(NamedTuple):
    """What came of it."""

    same: int
    """Batches that are the same to the byte."""
    differs: Differs | None
    """The first that is not: what follows was not looked at."""
    not_made: tuple[NotMade, ...]

    @property
    def exit_code(self) -> int:
        """As of `diff`: 0 all the same, 1 one differs, 2 none is known to, and some could not be compared."""
        if self.differs is not None:
            return 1
        return 2 if self.not_made else 0


class _CannotMake(Exception):
    """Why a batch cannot be made again."""


_Made: TypeAlias = tuple[BatchShipped, tuple[str, ...] | _CannotMake]
"""A batch that was shipped, and the hashes of the files that it is made into now."""


def remade(run_dir: Path) -> Remade:
    """Make the batches again, up to the first that is not what was shipped."""
    again = _Remaker(run_dir)
    return _compared(again.batches(), again.shipped)


def against(run_dir: Path, other: Path) -> Remade:
    """Make the batches of two runs again, up to the first in which they differ. Their files name their runs, which does not count."""
    theirs = {event.step: made for event, made in _Remaker(other, run_id="").batches()}
    left = dict(theirs)

    def shipped(event: BatchShipped) -> tuple[str, ...]:
        made = left.pop(event.step, ())
        if isinstance(made, _CannotMake):
            raise _CannotMake(f"that of {other} cannot be made: {made}")
        return made

    found = _compared(_Remaker(run_dir, run_id="").batches(), shipped)
    if found.differs is None and left:
        step = min(left)
        made = theirs[step]
        digest = made[0] if not isinstance(made, _CannotMake) else "one that cannot be made again"
        return Remade(found.same, Differs(step, 0, digest, ""), found.not_made)
    return found


def _compared(made: Iterator[_Made], shipped: Callable[[BatchShipped], tuple[str, ...]]) -> Remade:
    same = 0
    not_made: list[NotMade] = []
    for event, digests in made:
        try:
            if isinstance(digests, _CannotMake):
                raise digests
            then, now = shipped(event), digests
        except _CannotMake as why:
            not_made.append(NotMade(event.step, str(why)))
            continue
        for rank in range(max(len(then), len(now))):
            a, b = (each[rank] if rank < len(each) else "" for each in (then, now))
            if a != b:
                return Remade(same, Differs(event.step, rank, a, b), tuple(not_made))
        same += 1
    return Remade(same, None, tuple(not_made))


class _Remaker:
    def __init__(self, run_dir: Path, run_id: str | None = None) -> None:
        """`run_id`: instead of the run's own."""
        self._run_dir = run_dir
        self._run_id = run_id
        self._configs: dict[Path, RunConfig] = {}
        newest = config_file(run_dir, 0)
        self._sizes = {e.label: e.group_size for e in self._config(newest).env} if newest.is_file() else {}
        self._recovery: Recovery | None = Recovery(EMPTY, self._sizes)
        self._unfolded = ""
        """Why there is no recovery."""
        self._opened: RunOpened | None = None
        self._cut: dict[int, tuple[RolloutId, ...]] = {}
        """Batches that were cut and are not shipped yet."""
        self._dropped = dropped_before(run_dir)

    def batches(self) -> Iterator[_Made]:
        wanted = {r for record in self._records() for _, rollouts in _cut(record) for r in rollouts}
        tokens = TokenReader(self._run_dir, wanted, on_note=_unsaid)
        for record in self._records():
            event = record.event
            if isinstance(event, RunOpened):
                self._opened = event
            if isinstance(event, BatchShipped):
                try:
                    yield event, self._make(event, record.seq, tokens)
                except _CannotMake as why:
                    yield event, why
            self._fold(record)

    def shipped(self, event: BatchShipped) -> tuple[str, ...]:
        """Hashes of what was shipped; of the files, where the journal has none."""
        if event.digests:
            return event.digests
        folder = batch_dir(self._run_dir, event.step)
        if not folder.is_dir():
            raise _CannotMake(
                "the journal has no hash of its files, as an earlier release wrote none, and they are gone"
            )
        return tuple(
            [digest_of(rank_file(self._run_dir, event.step, n)) for n, _ in enumerate(folder.iterdir())]
        )

    def _records(self) -> Iterator[Record]:
        return read_journal(self._run_dir, on_note=_unsaid)

    def _fold(self, record: Record) -> None:
        event = record.event
        self._cut.update(_cut(record))
        try:
            if isinstance(event, RunOpened) and not event.recovered and record.seq > 0:
                self._recovery = self._from_checkpoint(event)
            elif self._recovery is not None:
                self._recovery.apply(*record)
        except CannotFold as why:
            self._recovery, self._unfolded = None, str(why)

    def _from_checkpoint(self, event: RunOpened) -> Recovery:
        """Where a life begins that read nothing behind its checkpoint."""
        state = RecordedRun(self._run_dir).checkpoint(event.checkpoint) if event.checkpoint else EMPTY
        if state is None:
            raise CannotFold(
                f"the run went on from a checkpoint alone, before record {event.checkpoint}, which is gone"
            )
        return Recovery(state, self._sizes)

    def _make(self, event: BatchShipped, seq: int, tokens: TokenReader) -> tuple[str, ...]:
        wanted = self._cut.pop(event.step, ())
        if self._recovery is None:
            raise _CannotMake(self._unfolded)
        tokens.read_to(seq)
        try:
            batch = self._recovery.batch(event.step, tokens.rollouts, tokens.extras)
        except CannotFold as why:
            if all(rollout in tokens.rollouts for rollout in wanted):
                raise _CannotMake(str(why)) from why
            raise _CannotMake(self._lost()) from why
        finally:
            tokens.forget(wanted)
        return self._digests(batch)

    def _lost(self) -> str:
        if not self._dropped:
            return "tokens of its rollouts are not in the store, though none were dropped from it: a file of it is gone"
        return (
            f"tokens of its rollouts are gone, with all that ended before record {self._dropped}: journal.keep_token_steps "
            "or journal.keep_token_mb dropped them"
        )

    def _digests(self, batch: Batch) -> tuple[str, ...]:
        if (opened := self._opened) is None:
            raise _CannotMake("the beginning of this life is not in the journal")
        path = config_file(self._run_dir, opened.config)
        if not path.is_file():
            raise _CannotMake(f"{path}, which says how it was packed, is gone")
        packed = pack_as(self._config(path).batch, batch)
        run_id = opened.run_id if self._run_id is None else self._run_id
        return tuple([encode(packed, n, run_id=run_id).digest for n, _ in enumerate(packed.ranks)])

    def _config(self, path: Path) -> RunConfig:
        if path not in self._configs:
            self._configs[path] = config_at(path)
        return self._configs[path]


def _cut(record: Record) -> list[tuple[int, tuple[RolloutId, ...]]]:
    return [(c.batch.step, c.batch.rollouts) for c in record.commands if isinstance(c, ShipBatch)]


def _unsaid(note: str) -> None:
    """What a kill left unfinished at the end of a file is none of this command's business."""


# ── telling ──


def told(found: Remade, shipped: str = "shipped", made: str = "made now") -> str:
    """Sentences for people."""
    said = []
    # Those that follow each other are told together: their steps are as far apart as their places.
    places = enumerate(found.not_made)
    for (why, _), several in groupby(places, key=lambda each: (each[1].why, each[1].step - each[0])):
        steps = [each.step for _, each in several]
        which = f"batch {steps[0]} was" if len(steps) == 1 else f"batches {steps[0]} to {steps[-1]} were"
        said.append(f"{which} not made again: {why}")
    if (d := found.differs) is not None:
        width = max(len(shipped), len(made))
        said += [
            f"batch {d.step}, rank {d.rank}, differs; {found.same} before it are the same",
            f"  {shipped:<{width}}  {d.shipped or 'nothing for this rank'}",
            f"  {made:<{width}}  {d.made or 'nothing for this rank'}",
        ]
    else:
        said.append(_how_many(found.same, len(found.not_made)))
    return "\n".join(said)


def _how_many(same: int, not_made: int) -> str:
    if not_made:
        return f"{same} of {same + not_made} batches are the same to the byte; {not_made} could not be made again"
    return "1 batch is the same to the byte" if same == 1 else f"{same} batches are the same to the byte"


def as_json(found: Remade) -> dict[str, Any]:
    """For scripts."""
    return {
        "same": found.same,
        "differs": None if found.differs is None else found.differs._asdict(),
        "not_made": [each._asdict() for each in found.not_made],
    }
