"""Files of checksummed frames: what the log files and the rollout store are made of.

    file   = magic (8) · schema u16 · 0 u16 · header bytes u32 · crc32 u32 · header (JSON) · frame …
    frame  = "PLFR" · kind u8 · commit u8 · ends u8 · 0 · payload bytes u32 · first seq u64 · last seq u64 ·
             crc32 of the payload u32 · crc32 of the 32 bytes before u32 · payload

Little-endian. A commit is some frames that are made durable together, before the next is begun; `commit` counts them in a
file, from 1 to 255 and round again, and `ends` is 1 in the last frame of one. A commit that goes on in the next file, because this
one is full, has no such frame here, and begins anew there. So damage in the last commit is a write that was
interrupted: it never counted, and is cut. A kill leaves a frame without its end; when the power fails, pages that were written
later may have reached the disk without those before them, so good frames of the same commit may follow. Damage that a
later commit follows is a broken disk or a foreign hand: `WireError`.

A file is never changed once another was begun: a writer that comes back after a crash begins a new one.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NamedTuple, Self, TypeAlias

import msgspec

from paceline.errors import WireError

MAGIC = b"\x89PLJ\r\n\x1a\n"

SCHEMA = 1
"""Of everything in the files. Fields may be added to records without a new number; readers ignore those they do not
know and fill in those they miss."""

RECORDS, ROLLOUTS, SNAPSHOT, EXTRAS, PARTS, KEPT = 1, 2, 3, 4, 5, 6
"""Kinds of frames. A reader skips kinds that it does not know. `SNAPSHOT` is reserved."""

_START = struct.Struct("<8sHHII")
_FRAME = struct.Struct("<4sBBBxIQQI")
_CRC = struct.Struct("<I")
_MARK = b"PLFR"
FRAME_BYTES = _FRAME.size + _CRC.size
_MAX_HEADER = 1 << 16
_MOST_ZEROS = 512
"""Bytes of a file that is never longer while its header is not on the disk: that is made durable before any frame, and is of 133
bytes, with a short name of the run. A longer one held records."""

FileKind: TypeAlias = Literal["log", "rollouts", "partial", "kept"]


class TornStart(WireError):
    """A file that was begun and never got its whole header: nothing was ever in it."""


class LeftOut(str):
    """A note of whole frames that do not count, which is more than the unfinished end that every kill may leave."""

    __slots__ = ()


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about itself."""

    run_id: str
    kind: FileKind
    number: int
    first_seq: int
    """Of the first record in this file."""
    follows: int
    """First seq that the files before do not hold. Below `first_seq` if records in between never became durable."""


class Frame(NamedTuple):
    """One frame that was read whole."""

    kind: int
    first_seq: int
    last_seq: int
    payload: bytes
    offset: int


def file_start(header: FileHeader) -> bytes:
    """What a new file begins with."""
    text = msgspec.json.encode(header)
    start = _START.pack(MAGIC, SCHEMA, 0, len(text), 0)[:-4]
    return start + _CRC.pack(zlib.crc32(text, zlib.crc32(start))) + text


class _Head(NamedTuple):
    """What a frame says of itself."""

    kind: int
    commit: int
    """0 in files of earlier releases, which did not tell."""
    ends: bool
    length: int
    first_seq: int
    last_seq: int
    crc: int


def next_commit(commit: int) -> int:
    """The number of the commit behind this one; 0 is the beginning of a file."""
    return commit % 255 + 1


def frame(
    kind: int, first_seq: int, last_seq: int, payload: bytes, commit: int = 0, *, ends: bool = True
) -> bytes:
    """One frame, to be written by one call. `ends`: the last one of its commit."""
    head = _FRAME.pack(_MARK, kind, commit, ends, len(payload), first_seq, last_seq, zlib.crc32(payload))
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload))


class FrameReader:
    """Reads the frames of one file in order; can be asked again when the file may have grown."""

    def __init__(self, path: Path) -> None:
        """WireError if the file is no journal, or of a release that this one cannot read."""
        self.path = path
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by close()
        except (IsADirectoryError, PermissionError) as error:
            raise WireError(
                f"{path} cannot be read: {error.strerror}; it belongs to the run's journal"
            ) from error
        try:
            self.header, self.offset = self._start()
        except BaseException:
            self._file.close()
            raise
        self._commit, self._ended = 0, True
        """Commit of the last frame, and whether it was the last one of that."""
        self.torn: str | None = None
        """What is wrong with the end of the file, when `next` returned None because of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def next(self, since: int = 0) -> Frame | None:
        """The next frame that holds a record from `since` on; None at the end of what is whole. WireError if a good
        frame follows a damaged one. What is passed over is not looked into."""
        size = os.fstat(self._file.fileno()).st_size
        self.torn = None
        while (at := self.offset) < size:
            if at + FRAME_BYTES > size:
                self.torn = f"{size - at} bytes of a frame at byte {at}"
                return None
            self._file.seek(at)
            head = _head(self._file.read(FRAME_BYTES))
            if head is None:
                self._damaged(at, "no frame begins there")
                return None
            kind, commit, ends, length, first_seq, last_seq, crc = head
            if at + FRAME_BYTES + length > size:
                self.torn = f"{size - at} bytes of a frame of {FRAME_BYTES + length} at byte {at}"
                return None
            if last_seq >= since:
                payload = self._file.read(length)
                if zlib.crc32(payload) != crc:
                    self._damaged(at, f"its checksum is {zlib.crc32(payload):08x}, {crc:08x} was written")
                    return None
                self.offset = at + FRAME_BYTES + length
                self._commit, self._ended = commit, ends
                return Frame(kind, first_seq, last_seq, payload, at)
            self.offset = at + FRAME_BYTES + length
            self._commit, self._ended = commit, ends
        return None

    def _start(self) -> tuple[FileHeader, int]:
        start = self._file.read(_START.size)
        size = os.fstat(self._file.fileno()).st_size
        if size <= _MOST_ZEROS and not any(start) and not any(self._file.read()):
            raise TornStart(f"{self.path} has nothing but zeros: it was begun, and never reached the disk")
        if not start.startswith(MAGIC[: len(start)]):
            raise WireError(f"{self.path} is no journal file: it begins with {start[:8]!r}, not {MAGIC!r}")
        if len(start) < _START.size:
            raise TornStart(f"{self.path} has {len(start)} bytes: it was begun and never written to")
        _, schema, _, length, crc = _START.unpack(start)
        if schema != SCHEMA:
            raise WireError(
                f"{self.path} has journal schema {schema}, this Paceline reads {SCHEMA}: read it with the release "
                "that wrote it"
            )
        text = self._file.read(length) if length <= _MAX_HEADER else b""
        if len(text) < length <= _MAX_HEADER:
            raise TornStart(
                f"{self.path} has {len(text)} bytes of a header of {length}: it was never written to"
            )
        if len(text) != length or zlib.crc32(text, zlib.crc32(start[:-4])) != crc:
            raise WireError(
                f"{self.path} is damaged at byte 0: its header of {length} bytes is not what was written"
            )
        try:
            return msgspec.json.decode(text, type=FileHeader), _START.size + length
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"{self.path} has a header that cannot be read: {error}") from error

    def _damaged(self, at: int, what: str) -> None:
        """Note a torn end; WireError if it is none, because a good frame of a later commit follows."""
        self._file.seek(at + 1)
        rest = self._file.read()
        unfinished = next_commit(self._commit) if self._ended else self._commit
        left_out = 0
        found = rest.find(_MARK)
        while found >= 0:
            head = _head(rest[found : found + FRAME_BYTES])
            whole = head is not None and _is_whole(head, rest[found + FRAME_BYTES :][: head.length])
            if head is not None and whole:
                if head.commit != unfinished:
                    raise WireError(
                        f"{self.path} is damaged at byte {at}: {what}, and a good frame follows at byte "
                        f"{at + 1 + found}, so this is no interrupted write: restore the file from a copy"
                    )
                left_out += 1
                found += FRAME_BYTES + head.length - 1
            found = rest.find(_MARK, found + 1)
        self.torn = f"a damaged frame at byte {at}: {what}"
        if left_out:
            self.torn = LeftOut(
                f"{self.torn}; it and what was written with it ({left_out} whole frames behind it, of {len(rest) + 1} bytes)"
            )


def _head(data: bytes) -> _Head | None:
    """None if these bytes begin no frame."""
    if len(data) < FRAME_BYTES or _CRC.unpack_from(data, _FRAME.size)[0] != zlib.crc32(data[: _FRAME.size]):
        return None
    mark, kind, commit, ends, *rest = _FRAME.unpack_from(data)
    return _Head(kind, commit, bool(ends), *rest) if mark == _MARK else None


def _is_whole(head: _Head, payload: bytes) -> bool:
    return len(payload) == head.length and zlib.crc32(payload) == head.crc
