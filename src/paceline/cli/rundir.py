"""Run directories: which one, what is in it, and where a resumed run goes on."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from paceline.cli.assemble import Resumption
from paceline.config import RunConfig
from paceline.errors import ConfigError, WireError
from paceline.runtime.checkpoints import Checkpoints
from paceline.transport.layout import batch_dir, weights_dir
from paceline.transport.status import read_status

CONFIG_FILE = "config.toml"
_TRAINER_CHECKPOINT = re.compile(r"v(\d{8})")


def new_run_dir(config: RunConfig) -> tuple[Path, str]:
    """A fresh directory `dir/name`, or `dir/name-2` and so on, and an id for the run."""
    root = Path(config.run.dir)
    path, number = root / config.run.name, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = root / f"{config.run.name}-{number}"
        except OSError as error:
            raise ConfigError(f"run.dir: cannot make {path}: {error}; choose another with --run.dir") from error
        else:
            return path, f"{path.name}-{secrets.token_hex(4)}"


def latest_run_dir(config: RunConfig) -> Path:
    """The newest directory of runs of this name. ConfigError when there is none."""
    root = Path(config.run.dir)
    named = re.compile(rf"{re.escape(config.run.name)}(?:-(\d+))?")
    found = [
        (int(match[1] or 1), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if path.is_dir() and (match := named.fullmatch(path.name))
    ]
    if not found:
        raise ConfigError(f"--resume: there is no run called {config.run.name!r} in {root}: start it without --resume")
    return max(found)[1]


def resumption(run_dir: Path, config: RunConfig) -> tuple[str, Resumption | None, list[str]]:
    """The run's id, where it goes on (None: from the beginning), and notes for people.

    The core goes on from its newest checkpoint k; the trainer from its newest checkpoint t that is not beyond k, and
    trains the batches t+1 to k again from disk. WireError when those batches are gone.
    """
    status = read_status(run_dir)
    if status is None:
        raise ConfigError(f"{run_dir} is no run directory: it has no status.json")
    core = Checkpoints(run_dir / "checkpoints" / "core", config.checkpoint.keep_last)
    found = core.newest_usable()
    if found is None:
        return status.run_id, None, ["the run has no checkpoint yet: it starts again at step 1"]
    step, state, notes = found
    trained = max([t for t in _trainer_steps(run_dir) if t <= step], default=0)
    missing = [n for n in range(trained + 1, step + 1) if not batch_dir(run_dir, n).is_dir()]
    if missing:
        raise WireError(
            f"{run_dir}: the trainer can go on from step {trained}, the orchestrator from step {step}, but batch "
            f"{missing[0]} in between is no longer kept: remove checkpoints/core/step_{step:06d}.ckpt to go on from an "
            "earlier one"
        )
    if trained and not weights_dir(run_dir, trained).is_dir():
        raise WireError(f"{run_dir}: weights/v{trained:06d} are gone, but the trainer's checkpoint is of that step")
    core.drop_after(step)
    return status.run_id, Resumption(state=state, step=step, trained=trained), notes


def _trainer_steps(run_dir: Path) -> list[int]:
    folder = run_dir / "checkpoints" / "trainer"
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _TRAINER_CHECKPOINT.fullmatch(p.name)))
