"""Is the run still going? One small file that the orchestrator replaces and the trainer looks at.

`status.json` also says which run the directory belongs to. Batches, weights and acknowledgements carry the same
run id, so that leftovers of another run are noticed before anybody trains on them.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from paceline.errors import ConfigError, WireError, printable
from paceline.transport.layout import (
    ACKS,
    BATCHES,
    STATUS,
    TRAINER_WAITS,
    WEIGHTS,
    ack_file,
    batch_dir,
    remove,
    replace_file,
    steps_in,
    versions_in,
    weights_dir,
)

Status: TypeAlias = Literal["running", "done", "stopped", "failed"]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `status.json` holds."""

    run_id: str
    status: Status
    reason: str = ""
    steps: int | None = None
    """Optimizer steps the run asks for (`run.max_steps`), not those it has taken; None when it does not say."""
    trained: int | None = None
    """Optimizer steps the trainer had acknowledged when the run ended; None while it runs, and where that is not known."""
    exit_code: int | None = None
    """None while it runs."""
    started: float = 0.0
    """Seconds since the epoch, as `ended`."""
    ended: float | None = None
    pid: int = 0
    """The orchestrator's process, on `host`."""
    host: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status != "running"


def read_status(run_dir: Path | str) -> RunStatus | None:
    """The run's status; None when the orchestrator has not written one yet. WireError if it is no status."""
    path = Path(run_dir) / STATUS
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(
            f"{path} is no run status: {error}; resuming the run makes it again, from the journal"
        ) from error


def write_status(run_dir: Path | str, status: RunStatus) -> None:
    """Replace the run's status, durably and in one step; in its own place where there is no room for a second file."""
    path, data = Path(run_dir) / STATUS, msgspec.json.encode(status) + b"\n"
    try:
        replace_file(path, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with path.open("r+b") as file:  # its block is there already
            file.write(data)
            file.truncate()


def open_run(
    run_dir: Path | str,
    run_id: str,
    *,
    resume_step: int | None = None,
    trained: int | None = None,
    steps: int | None = None,
) -> None:
    """Make the directory this run's, and tell trainers that it is going on.

    A fresh run (`resume_step` None) wants a directory without batches, acknowledgements or weights. A resumed run
    goes on behind step `resume_step`: what lies beyond it, from before the crash, is removed, so that nobody trains
    on it or takes its weights for this run's. `trained` is the step that the trainer goes on from, when that is
    earlier: it trains the batches between the two again, so their old acknowledgements and weights go as well.
    ConfigError says what is in the way.
    """
    root = Path(run_dir)
    before = read_status(root)
    if before is not None and before.run_id != run_id:
        raise ConfigError(
            f"{root} belongs to run {before.run_id!r}, this is run {run_id!r}: choose another directory, "
            "or resume that run"
        )
    if resume_step is None:
        held = {
            BATCHES: steps_in(root / BATCHES),
            ACKS: steps_in(root / ACKS),
            WEIGHTS: versions_in(root / WEIGHTS),
        }
        found = [f"{name} up to {numbers[-1]}" for name, numbers in held.items() if numbers]
        if found:
            raise ConfigError(
                f"{root} already holds {', '.join(found)}, but a fresh run starts at step 1: resume the run, "
                "or choose another directory"
            )
    else:
        _forget_after(root, resume_step, resume_step if trained is None else trained)
    for unfinished in (root / BATCHES).glob(".step_*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    (root / TRAINER_WAITS).unlink(missing_ok=True)  # a trainer that still waits says so again
    write_status(root, RunStatus(run_id=run_id, status="running", steps=steps))


def finish(run_dir: Path | str, status: Status = "done", reason: str = "") -> None:
    """Tell trainers that no further batch will come. WireError if the run was never opened."""
    before = read_status(run_dir)
    if before is None:
        raise WireError(f"{run_dir} has no {STATUS}: open the run before it is finished")
    write_status(run_dir, msgspec.structs.replace(before, status=status, reason=printable(reason)))


def _forget_after(root: Path, cut: int, trained: int) -> None:
    # Acknowledgements go first: one that outlived its batch would let a trainer skip a step.
    for name, last in ((ACKS, trained), (BATCHES, cut), (WEIGHTS, trained)):
        of_number, numbers = _PLACES[name]
        for number in numbers(root / name):
            if number > last:
                remove(of_number(root, number))


_PLACES = {
    ACKS: (ack_file, steps_in),
    BATCHES: (batch_dir, steps_in),
    WEIGHTS: (weights_dir, versions_in),
}
