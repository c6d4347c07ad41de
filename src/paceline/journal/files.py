"""Where the files are, what they are called, and reading all frames of one kind in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from paceline.errors import WireError
from paceline.journal.frames import FileKind, Frame, FrameReader, LeftOut, TornStart

FOLDERS: dict[FileKind, str] = {"log": "journal", "rollouts": "rollouts", "partial": "partial"}
SUFFIXES: dict[FileKind, str] = {"log": ".log", "rollouts": ".seg", "partial": ".part"}

FOLLOW_POLL_S = 0.1
"""Like everything that reads a run directory from elsewhere: network file systems send no events."""


def file_path(run_dir: Path, kind: FileKind, number: int) -> Path:
    return run_dir / FOLDERS[kind] / f"{number:06d}{SUFFIXES[kind]}"


def file_numbers(run_dir: Path, kind: FileKind) -> list[int]:
    """Numbers of the files of one kind, ascending."""
    folder = run_dir / FOLDERS[kind]
    if not folder.is_dir():
        return []
    stems = [path.stem for path in folder.iterdir() if path.suffix == SUFFIXES[kind]]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def next_seq(run_dir: Path, kind: FileKind, run_id: str) -> int:
    """The first number that these files do not hold. WireError if they are of another run, or damaged."""
    for number in reversed(file_numbers(run_dir, kind)):
        path = file_path(run_dir, kind, number)
        try:
            reader = FrameReader(path)
        except TornStart:
            continue  # begun, and killed before its header was whole: nothing was ever in it
        with reader:
            if reader.header.run_id != run_id:
                raise WireError(
                    f"{path} is of run {reader.header.run_id!r}, this is run {run_id!r}: choose another run directory"
                )
            after = reader.header.follows
            while (frame := reader.next()) is not None:
                after = max(after, frame.last_seq + 1)
            return after
    return 0


def first_seq_of(run_dir: Path, kind: FileKind, number: int) -> int | None:
    """First number in one file; None when it was begun and never written to. OSError when it is gone."""
    try:
        with FrameReader(file_path(run_dir, kind, number)) as reader:
            return reader.header.first_seq
    except TornStart:
        return None


def dropped_before(run_dir: Path) -> int:
    """Rollouts that ended in a record before this one are no longer in the store; 0 while it has all."""
    numbers = file_numbers(run_dir, "rollouts")
    if not numbers or numbers[0] == 1:
        return 0
    firsts = (first_seq_of(run_dir, "rollouts", number) for number in numbers)
    return next((first for first in firsts if first is not None), 0)


def read_frames(
    run_dir: Path,
    kind: FileKind,
    *,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    since: int = 0,
    on_note: Callable[[str], None],
) -> Iterator[tuple[Path, Frame]]:
    """All frames of one kind in order; `follow` waits for more until `stop` says so. Notes tell what was cut.

    `since` leaves out those whose records are all before that number. WireError for damage that is no interrupted
    write, and for log files of which one is missing.
    """
    at = _last_before(run_dir, kind, since) - 1 if since else 0
    following = 0 if at <= 0 else None
    while True:
        number = next((n for n in file_numbers(run_dir, kind) if n > at), None)
        if number is None:
            if not follow or (stop is not None and stop()):
                return
            time.sleep(FOLLOW_POLL_S)
            continue
        path = file_path(run_dir, kind, number)
        try:
            reader = FrameReader(path)
        except FileNotFoundError:
            at = number  # retention dropped it a moment ago
            continue
        except TornStart as torn:
            is_last = number == file_numbers(run_dir, kind)[-1]
            if follow and is_last and not (stop is not None and stop()):
                time.sleep(FOLLOW_POLL_S)  # it is being begun
                continue
            on_note(str(torn))
            at = number
            continue
        with reader:
            if following is None:
                following = reader.header.follows
            if kind == "log" and reader.header.follows > following:
                raise WireError(
                    f"{path} follows record {reader.header.follows - 1}, but the files before it end with record "
                    f"{following - 1}: restore what is missing from a copy"
                )
            for frame in _frames(reader, partial(has_later, run_dir, kind, path), follow, stop, since):
                yield path, frame
                following = max(following, frame.last_seq + 1)
            if reader.torn:
                note = f"{path}: {reader.torn} was never finished and does not count"
                on_note(LeftOut(note) if isinstance(reader.torn, LeftOut) else note)
        at = number


def has_later(run_dir: Path, kind: FileKind, path: Path) -> bool:
    """Whether a file was begun after this one."""
    return file_numbers(run_dir, kind)[-1] > int(path.stem)


def _last_before(run_dir: Path, kind: FileKind, since: int) -> int:
    """The number of the last file that begins at or before a record; 0 when there is none."""
    for number in reversed(file_numbers(run_dir, kind)):
        try:
            with FrameReader(file_path(run_dir, kind, number)) as reader:
                if reader.header.first_seq <= since:
                    return number
        except (TornStart, FileNotFoundError):
            continue
    return 0


def _frames(
    reader: FrameReader,
    is_over: Callable[[], bool],
    follow: bool,
    stop: Callable[[], bool] | None,
    since: int,
) -> Iterator[Frame]:
    """The frames of one file; with `follow`, until a later file has been begun."""
    while True:
        over = is_over()  # asked first: what was written before the next file was begun must not be missed
        while (frame := reader.next(since)) is not None:
            yield frame
        if over or not follow or (stop is not None and stop()):
            return
        time.sleep(FOLLOW_POLL_S)
