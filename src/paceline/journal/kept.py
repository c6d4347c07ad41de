"""A run's records in one file, without its rollouts: see `docs/kept.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from paceline.errors import WireError
from paceline.journal.frames import KEPT, RECORDS, FileHeader, Frame, FrameReader, file_start, frame
from paceline.journal.lines import Restorer
from paceline.journal.packing import BLOCK_RECORDS, Packer, Unpacker
from paceline.journal.reader import Record

_LEVEL = 19
"""It is written once, and goes into repositories."""


def write_records(file: BinaryIO, records: Iterable[Record], most_bytes: int) -> int:
    """Append frames of records until they are all there, or another would be too much; how many there are."""
    packer, written, left = Packer(_LEVEL), 0, iter(records)
    while block := list(islice(left, BLOCK_RECORDS)):
        payload = packer.records(block)
        if file.tell() + len(payload) > most_bytes:
            break
        file.write(frame(RECORDS, block[0].seq, block[-1].seq, payload))
        written += len(block)
    return written


def kept_start(run_id: str, about: bytes) -> bytes:
    """What the file begins with; `about` is what it says of itself."""
    header = FileHeader(run_id=run_id, kind="kept", number=1, first_seq=0, follows=0)
    return file_start(header) + frame(KEPT, 0, 0, about)


def read_about(path: Path) -> bytes:
    """What the file says of itself. WireError if it is no kept journal."""
    for found in _frames(path):
        if found.kind == KEPT:
            return found.payload
        break
    raise WireError(f"{path} is damaged: it does not say what it is of; take it from where it was kept again")


def read_kept(path: Path, since: int = 0) -> Iterator[Record]:
    """Its records, from that one on. WireError where it is damaged."""
    unpacker, restorer = Unpacker(), Restorer()
    for found in _frames(path):
        if found.kind != RECORDS:
            continue
        for line in unpacker.records(found.payload, f"{path} at byte {found.offset}"):
            event = restorer.event(line.event)
            commands = tuple([restorer.command(command) for command in line.commands])
            if line.seq >= since:
                yield Record(line.seq, line.at, event, commands)


def _frames(path: Path) -> Iterator[Frame]:
    with FrameReader(path) as reader:
        if reader.header.kind != "kept":
            raise WireError(
                f"{path} is a file of kind {reader.header.kind!r}, no kept journal: give the run's directory, or a file that "
                "`paceline replay RUN --keep FILE` has made"
            )
        while (found := reader.next()) is not None:
            yield found
        if reader.torn:
            raise WireError(f"{path} is cut off: {reader.torn}; take it from where it was kept again")
