"""The core's own state on disk: `checkpoints/core/step_000010.ckpt`.

A file is magic, CRC-32 and zstd-compressed msgpack; it is written under another name, synced and renamed, so a crash
leaves the one before. No pickle: a checkpoint is data, whoever wrote it.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from paceline.errors import WireError

_MAGIC = b"PLCKPT1\n"
_NAME = re.compile(r"step_(\d{6,})\.ckpt")


class Checkpoints:
    """Saves, finds and loads them."""

    def __init__(self, folder: Path, keep_last: int, run_id: str = "") -> None:
        """`run_id`: of the run that they are of, which is written into them; empty where that does not matter."""
        self._folder = folder
        self._keep = keep_last
        self._run_id = run_id

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write durably; older ones beyond the number to keep go. OSError when the disk does not take it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        saved = {"run_id": self._run_id, **state} if self._run_id else state
        body = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(saved))
        path = self._folder / f"step_{step:06d}.ckpt"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(_MAGIC + zlib.crc32(body).to_bytes(4, "little") + body)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # the room that half of it takes is needed
            raise
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for old in self.steps()[: -self._keep]:
            self._path(old).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; leftovers of interrupted saves are not among them."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def load(self, step: int) -> dict[str, Any]:
        """Read one back. WireError when the file is damaged, or not what its name and place say."""
        path = self._path(step)
        data = path.read_bytes()
        head, body = data[: len(_MAGIC) + 4], data[len(_MAGIC) + 4 :]
        if not head.startswith(_MAGIC):
            raise WireError(f"{path} is not a checkpoint of this version: it starts with {data[:8]!r}")
        said, found = int.from_bytes(head[len(_MAGIC) :], "little"), zlib.crc32(body)
        if said != found:
            raise WireError(
                f"{path} is damaged: checksum {found:08x}, expected {said:08x}; remove it to resume from the one before"
            )
        state: dict[str, Any] = msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(body), strict=False
        )
        run_id = state.pop("run_id", self._run_id)  # earlier releases did not write it
        if self._run_id and run_id != self._run_id:
            raise WireError(f"{path} is of run {run_id!r}, this is run {self._run_id!r}: remove it")
        if state["cut"] != step:
            raise WireError(f"{path} holds step {state['cut']}, not the one in its name: remove it")
        return state

    def newest_usable(self) -> tuple[int, dict[str, Any], list[str]] | None:
        """The newest that can be loaded, with a note on each later one, which was passed over; None when there is none at
        all."""
        notes: list[str] = []
        for step in reversed(self.steps()):
            try:
                return step, self.load(step), notes
            except WireError as error:
                notes.append(str(error))
        if notes:
            raise WireError("no checkpoint can be read:\n  " + "\n  ".join(notes))
        return None

    def drop_after(self, step: int) -> None:
        """Remove the ones of later steps: the run goes on from `step` and will make its own."""
        for later in self.steps():
            if later > step:
                self._path(later).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.ckpt"
