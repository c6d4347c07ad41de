"""Files of frames as they are written: numbered, begun anew when one is full or in doubt."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from paceline.errors import WireError
from paceline.journal.files import file_numbers, file_path
from paceline.journal.frames import FileHeader, FileKind, file_start, frame, next_commit


class Output:
    """Numbered files of frames in one folder; the next is begun when one is full, or when one failed."""

    def __init__(self, root: Path, kind: FileKind, run_id: str, full: int, follows: int) -> None:
        """`full`: bytes after which the next file is begun. `follows`: the first number that is not there yet."""
        self._root = root
        self._kind: FileKind = kind
        self._run_id = run_id
        self._full = full
        self._file: BinaryIO | None = None
        self._size = 0
        self._durable = 0
        """Bytes of the file that were flushed."""
        self._dirty = False
        self._has_name = False
        """Whether the file system counts the names of files, so that one without any has been removed."""
        self._commit = 0
        """Number of the last commit in the file."""
        self._follows = follows
        self._last_seq = follows - 1
        self.written = 0
        """Bytes, over all files."""
        self.begun = 0
        """Files, by this process."""

    def write(self, kind: int, first_seq: int, last_seq: int, payload: bytes, *, ends: bool = True) -> None:
        """`ends`: this is the last frame before the next `flush`."""
        file = self._file if self._file is not None and self._size < self._full else self._begin(first_seq)
        self._put(file, frame(kind, first_seq, last_seq, payload, next_commit(self._commit), ends=ends))
        self._last_seq = last_seq
        self._dirty = True

    def flush(self) -> None:
        """WireError when the file has been removed meanwhile, and what it held with it."""
        if self._file is not None and self._dirty:
            os.fsync(self._file.fileno())
            if self._has_name and not os.fstat(self._file.fileno()).st_nlink:
                raise WireError(
                    f"{self._file.name} was removed while it was being written, and the records in it are lost: nothing may "
                    "touch a run's directory while it goes on"
                )
            self._dirty = False
            self._durable = self._size
            self._commit = next_commit(self._commit)
            self._follows = self._last_seq + 1

    def repair(self) -> None:
        """Cut off what was not flushed, and go on in the same file: what a full disk took of a frame is no frame, and the
        room that it has is needed."""
        if self._file is None or self._size == self._durable:
            return
        try:
            os.ftruncate(self._file.fileno(), self._durable)
            self._file.seek(self._durable)
            os.fsync(self._file.fileno())
        except OSError:
            self.abandon()
            return
        self._size, self._last_seq, self._dirty = self._durable, self._follows - 1, False

    def abandon(self) -> None:
        """Write no more to this file; what it holds since the last flush is in doubt."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
        self._dirty = False

    def _begin(self, first_seq: int) -> BinaryIO:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None
        number = max(file_numbers(self._root, self._kind), default=0) + 1
        header = FileHeader(
            run_id=self._run_id,
            kind=self._kind,
            number=number,
            first_seq=first_seq,
            follows=self._follows,
        )
        path = file_path(self._root, self._kind, number)
        file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by _begin or abandon
        self._file = file
        self._size = self._commit = 0
        try:
            self._put(file, file_start(header))
            os.fsync(file.fileno())
            self._has_name = os.fstat(file.fileno()).st_nlink > 0
            self._durable = self._size
        except OSError:
            # A file without a whole header is no journal file. It must not be there for a reader to trip over.
            self.abandon()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.begun += 1
        return file

    def _put(self, file: BinaryIO, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = file.write(view)
            self._size += count
            self.written += count
            view = view[count:]
