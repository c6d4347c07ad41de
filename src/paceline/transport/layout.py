"""Where a run keeps what passes between orchestrator and trainer, and how files get there whole.

    RUN/status.json                       the orchestrator: is the run still going?
    RUN/batches/step_000001/rank_0000.plb the orchestrator: what step 1 trains on, one file a rank
    RUN/acks/step_000001.json             the trainer: step 1 is done, with its metrics
    RUN/weights/v000001/version.json ...  the trainer: the weights that step 1 made
    RUN/weights/v000001/probe.json        the trainer, if it likes: what those weights make of a few prompts
    RUN/trainer_waits.json                the trainer: what it has no room to write, while that is so

Everything appears by a rename, after it was flushed to disk: whoever sees a name sees all of it, after a power cut
too. Names that begin with a dot are unfinished and belong to whoever writes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

BATCHES = "batches"
ACKS = "acks"
WEIGHTS = "weights"
STATUS = "status.json"
TRAINER_WAITS = "trainer_waits.json"
VERSION_FILE = "version.json"
PROBE_FILE = "probe.json"

_STEP = re.compile(r"step_(\d{6,})(?:\.json)?")
_VERSION = re.compile(r"v(\d{6,})")


def batch_dir(run_dir: Path, step: int) -> Path:
    return run_dir / BATCHES / f"step_{step:06d}"


def rank_file(run_dir: Path, step: int, rank: int) -> Path:
    return batch_dir(run_dir, step) / f"rank_{rank:04d}.plb"


def ack_file(run_dir: Path, step: int) -> Path:
    return run_dir / ACKS / f"step_{step:06d}.json"


def weights_dir(run_dir: Path, version: int) -> Path:
    return run_dir / WEIGHTS / f"v{version:06d}"


def steps_in(folder: Path) -> list[int]:
    """Numbers of the `step_…` entries of a folder, ascending; empty when there is no folder yet."""
    return _numbers(folder, _STEP)


def versions_in(folder: Path) -> list[int]:
    """Numbers of the `v…` entries of a folder, ascending, complete or not."""
    return _numbers(folder, _VERSION)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            found = [pattern.fullmatch(entry.name) for entry in entries]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in found if match)


def write_file(path: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file piece by piece. Neither flushed nor atomic: `commit_directory` and `replace_file` are."""
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        write_file(temporary, [data])
        flush_entry(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_entry(path.parent)


def commit_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a hidden directory, flush them, and give it the name `path`.

    A directory already there is replaced. Whatever `fill` raises leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    replaced = path.parent / f".{path.name}.{os.getpid()}.old.tmp"
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        for entry in [*temporary.rglob("*"), temporary]:
            flush_entry(entry)
        if path.exists():
            # No directory can be renamed over one that is not empty. Between these two lines there is none,
            # which readers take for not there yet.
            path.rename(replaced)
        temporary.rename(path)
        flush_entry(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def flush_entry(path: Path) -> None:
    """fsync a file or a directory: a rename is durable only once its directory is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a directory in a way that no reader sees half of it."""
    hidden = path.parent / f".{path.name}.{os.getpid()}.old.tmp"
    with contextlib.suppress(FileNotFoundError):
        path.rename(hidden)
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink()
