"""What a run takes of its disk, by what it is."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paceline.errors import is_full
from paceline.journal.files import FOLDERS
from paceline.runtime.room import RETRY_S
from paceline.transport.layout import BATCHES, WEIGHTS
from paceline.transport.room import trainer_waits

_PARTS = {
    FOLDERS["log"]: "events",
    FOLDERS["rollouts"]: "tokens",
    BATCHES: "batches",
    WEIGHTS: "weights",
    "checkpoints": "checkpoints",
}
_EVERY_S = 10.0
_LITTLE = 2**20
"""Bytes free below which it is tried whether anything can be written at all; some may write more than what is free to all."""
_PROBE = ".room"


class DiskUse(NamedTuple):
    """Bytes."""

    parts: dict[str, int]
    """Of the run directory, by what it is; all the rest is `other`."""
    free: int
    """Of the file system that it is on."""

    def __str__(self) -> str:
        told = ", ".join(f"{name} {size_of(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
        return f"{size_of(sum(self.parts.values()))} ({told}), {size_of(self.free)} free"

    def bytes(self) -> dict[str, int]:
        """All of it by name."""
        return {**self.parts, "free": self.free}


def disk_use(run_dir: Path) -> DiskUse:
    """Look at every file of a run directory. What vanishes meanwhile, or may not be looked at, does not count. OSError when
    the directory itself cannot be."""
    parts = dict.fromkeys((*_PARTS.values(), "other"), 0)
    with os.scandir(run_dir) as entries:
        for entry in entries:
            parts[_PARTS.get(entry.name, "other")] += _bytes_of(entry)
    return DiskUse(parts, shutil.disk_usage(run_dir).free)


def _bytes_of(entry: os.DirEntry[str]) -> int:
    try:
        if not entry.is_dir(follow_symlinks=False):
            return entry.stat(follow_symlinks=False).st_size
        with os.scandir(entry) as entries:
            return sum(map(_bytes_of, entries))
    except OSError:
        return 0


def size_of(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def no_room(run_dir: Path) -> str:
    """Why nothing can be written into the run directory for want of room; empty where something can. Tries it."""
    probe = run_dir / _PROBE
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(65536))
            os.fsync(file.fileno())
    except OSError as error:
        if is_full(error):
            return str(error)
        raise
    finally:
        probe.unlink(missing_ok=True)
    return ""


class DiskMeter:
    """Looks now and then, off the loop: a file server may take its time over it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.latest: DiskUse | None = None

    async def run(self, room: Callable[[str, str], None]) -> None:
        """Never ends by itself. `room` is told what cannot be written and why, and with an empty reason when it can be
        again: whoever waits for somebody in another process, who waits for room, has nothing to write and notices nothing.
        WireError when a trainer says so in a way that nobody can read."""
        missing: dict[str, str] = {}
        while True:
            try:
                self.latest, now = await asyncio.to_thread(self._look)
            except OSError:
                self.latest = None  # whoever has to write there will say what is wrong
            else:
                for what in missing.keys() - now.keys():
                    room(what, "")
                for what in now.keys() - missing.keys():
                    room(what, now[what])
                missing = now
            # While nothing can be written, a clock runs that may end the run: it must not run on when there is room again.
            await asyncio.sleep(min(_EVERY_S, RETRY_S) if missing else _EVERY_S)

    def _look(self) -> tuple[DiskUse, dict[str, str]]:
        use = disk_use(self._run_dir)
        missing = {}
        if use.free < _LITTLE and (why := no_room(self._run_dir)):
            missing["the run directory"] = why
        # What a trainer writes is large: there may be room for everything else, and none for that.
        if (waits := trainer_waits(self._run_dir)) is not None:
            missing[f"the trainer's {waits.what}"] = waits.why
        return use, missing

    def values(self) -> dict[str, float]:
        """The latest as metrics; none before the first."""
        return {} if self.latest is None else {f"disk/{k}": n for k, n in self.latest.bytes().items()}

    def line(self) -> str:
        """The latest in a few words; empty before the first."""
        if self.latest is None:
            return ""
        return f"{size_of(sum(self.latest.parts.values()))}, {size_of(self.latest.free)} free"
