"""Reading a journal: of a run that ended, crashed, or is still going."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.domain.commands import Command, FinishRun
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import WireError
from paceline.journal.files import FOLDERS, file_numbers, has_later, read_frames
from paceline.journal.frames import EXTRAS, RECORDS, ROLLOUTS, Frame
from paceline.journal.lines import Restorer
from paceline.journal.packing import Extra, Unpacker

_log = logging.getLogger("paceline.journal")


class Record(NamedTuple):
    """What happened, and what the core wanted done about it."""

    seq: int
    at: float
    """Seconds of the run's clock."""
    event: Event
    commands: tuple[Command, ...]


def read_journal(
    run_dir: Path | str,
    *,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    since: int = 0,
    on_note: Callable[[str], None] = _log.warning,
) -> Iterator[Record]:
    """Yield the records of a run in order.

    Token arrays, messages and `info` are left out (see `lines`): arrays have their length and hold zeros. `follow`
    waits for more until a record ends the run or `stop` says so. `since` begins with that record; a `ProcessGroup` then
    lacks rollouts that ended before. `on_note` is told of an unfinished end that was cut. WireError names file and byte
    of damage that is no interrupted write.
    """
    root = Path(run_dir)
    if not follow:
        _require(root)
    unpacker, restorer = Unpacker(), Restorer()
    expected = since
    for path, frame in read_frames(root, "log", follow=follow, stop=stop, since=since, on_note=on_note):
        if frame.kind != RECORDS:
            continue
        for line in unpacker.records(frame.payload, f"{path} at byte {frame.offset}"):
            if line.seq < expected:
                continue  # written again, to another file, after the disk had failed
            expected = line.seq + 1
            event = restorer.event(line.event)
            commands = tuple([restorer.command(command) for command in line.commands])
            yield Record(line.seq, line.at, event, commands)
            is_last = any(isinstance(command, FinishRun) for command in commands)
            # A run that was resumed goes on in the next file.
            if follow and is_last and not has_later(root, "log", path):
                return


def read_rollouts(
    run_dir: Path | str,
    ids: Collection[RolloutId] | None = None,
    *,
    since: int = 0,
    on_note: Callable[[str], None] = _log.warning,
) -> Iterator[Rollout]:
    """Yield rollouts as they were recorded, with tokens, messages and `info`, in the order in which they ended.

    `ids` picks some; blocks without any of them are not unpacked. `since` leaves out those that ended before that
    record. One that ran again after a resume comes again, and the later counts. Rollouts of the last moment before a
    crash may be here and not in the log. What retention has dropped does not come.
    """
    root = Path(run_dir)
    _require(root)
    wanted = None if ids is None else frozenset(ids)
    unpacker = Unpacker()
    expected = 0
    for path, frame in read_frames(root, "rollouts", since=since, on_note=on_note):
        if frame.kind != ROLLOUTS or frame.first_seq < expected:
            continue  # the same again, after the disk had failed
        expected = frame.last_seq + 1
        yield from unpacker.rollouts(frame.payload, f"{path} at byte {frame.offset}", wanted)


def read_extras(
    run_dir: Path | str, *, since: int = 0, on_note: Callable[[str], None] = _log.warning
) -> dict[RolloutId, dict[int, Extra]]:
    """Advantages that differ from token to token, and streams, of samples that were queued: by rollout, then by number
    of the sample. Most runs have none."""
    unpacker = Unpacker()
    found: dict[RolloutId, dict[int, Extra]] = {}
    for path, frame in read_frames(Path(run_dir), "rollouts", since=since, on_note=on_note):
        if frame.kind == EXTRAS:
            for rollout, number, extra in unpacker.extras(frame.payload, f"{path} at byte {frame.offset}"):
                found.setdefault(rollout, {})[number] = extra
    return found


class TokenReader:
    """Tokens of some rollouts, read as far as the log has been: for folds that need them in its order.

    Who forgets what it has used holds in memory no more than what is still needed, however long the run.
    """

    def __init__(
        self,
        run_dir: Path | str,
        wanted: Collection[RolloutId],
        *,
        on_note: Callable[[str], None] = _log.warning,
    ) -> None:
        self._wanted = wanted
        self._unpacker = Unpacker()
        self._expected = 0
        # Apart, since in a commit the advantages come behind the rollouts, which are of later records, too.
        self._pulls = [
            _Pull(read_frames(Path(run_dir), "rollouts", on_note=on_note), kind, take)
            for kind, take in ((ROLLOUTS, self._rollouts), (EXTRAS, self._extras))
        ]
        self.rollouts: dict[RolloutId, Rollout] = {}
        """Those that were read. One that ran again after a resume has replaced its earlier self."""
        self.extras: dict[RolloutId, dict[int, Extra]] = {}
        """As `read_extras` has them."""

    def read_to(self, seq: int) -> None:
        """Read what records up to this one tell of, and maybe a little more: a frame is read whole."""
        for pull in self._pulls:
            pull.to(seq)

    def forget(self, rollouts: Iterable[RolloutId]) -> None:
        for rollout in rollouts:
            self.rollouts.pop(rollout, None)
            self.extras.pop(rollout, None)

    def _rollouts(self, frame: Frame, where: str) -> None:
        if frame.first_seq >= self._expected:  # else it is the same again, after the disk had failed
            self._expected = frame.last_seq + 1
            self.rollouts.update(
                {r.id: r for r in self._unpacker.rollouts(frame.payload, where, self._wanted)}
            )

    def _extras(self, frame: Frame, where: str) -> None:
        for rollout, number, extra in self._unpacker.extras(frame.payload, where):
            if rollout in self._wanted:
                self.extras.setdefault(rollout, {})[number] = extra


class _Pull:
    """Frames of one kind, taken as far as the log has been."""

    def __init__(
        self, frames: Iterator[tuple[Path, Frame]], kind: int, take: Callable[[Frame, str], None]
    ) -> None:
        self._frames = ((path, frame) for path, frame in frames if frame.kind == kind)
        self._take = take
        self._next = next(self._frames, None)

    def to(self, seq: int) -> None:
        while self._next is not None and self._next[1].first_seq <= seq:
            path, frame = self._next
            self._take(frame, f"{path} at byte {frame.offset}")
            self._next = next(self._frames, None)


def _require(root: Path) -> None:
    if not root.is_dir():
        raise WireError(f"{root}: no such run directory")
    if not file_numbers(root, "log"):
        raise WireError(f"{root} holds no journal: {root / FOLDERS['log']} has no log file")
