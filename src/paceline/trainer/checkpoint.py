"""Checkpoints of the trainer: model, optimizer and version, whole or not there, the newest few kept."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.errors import TrainerError
from paceline.trainer.step import Trainer
from paceline.transport.layout import commit_directory

_NAME = re.compile(r"v(\d{8})")
_FILE = "trainer.pt"


def checkpoint_dir(root: Path, version: int) -> Path:
    return root / f"v{version:08d}"


def save_checkpoint(trainer: Trainer, root: Path, keep_last: int) -> Path:
    """Write `root/v<version>` atomically, then delete all but the newest `keep_last`."""
    out = checkpoint_dir(root, trainer.version)

    def fill(folder: Path) -> None:
        saved = {
            "version": trainer.version,
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
        }
        # Given a path, torch writes by itself, and does not say that the disk is full when it is.
        with (folder / _FILE).open("wb") as file:
            torch.save(saved, file)

    commit_directory(out, fill)
    for _, old in _checkpoints(root)[:-keep_last]:
        shutil.rmtree(old)
    return out


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Put `trainer` where it was when `path` was written, bit for bit. TrainerError if it does not fit, or is of another
    version than its name says."""
    try:
        # weights_only: a checkpoint is data. Unpickling one must not run what someone put in it.
        saved: dict[str, Any] = torch.load(path / _FILE, map_location="cpu", weights_only=True)
        version, named = int(saved["version"]), _NAME.fullmatch(path.name)
        if named and int(named[1]) != version:
            raise TrainerError(
                f"checkpoint {path} holds version {version}, not the one in its name: remove it"
            )
        trainer.model.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        for (
            group
        ) in trainer.optimizer.param_groups:  # those that were saved are of the settings that it had then
            group["weight_decay"], group["betas"] = trainer.settings.weight_decay, trainer.settings.betas
        trainer.version = version
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainerError(
            f"checkpoint {path} cannot be loaded into this model: {error}; if it is damaged, remove it to go on from "
            "the one before"
        ) from error


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`; None if there is none."""
    found = _checkpoints(root)
    return found[-1][1] if found else None


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Oldest first."""
    if not root.is_dir():
        return []
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))
