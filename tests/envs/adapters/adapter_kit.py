"""Interpreters that have an environment package, for tests of its adapter: `PACELINE_ADAPTERS` names their folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig


def interpreter(name: str, package: str) -> str:
    """A Python that has `package`: our own, or that of the virtual environment `name` in $PACELINE_ADAPTERS.

    Skips, and says how to get one, where there is none.
    """
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    folder = os.environ.get("PACELINE_ADAPTERS", "")
    python = Path(folder or "nowhere") / name / "bin" / "python"
    if (
        python.exists()
        and subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0
    ):
        return str(python)
    pytest.skip(
        f"needs {package} in an environment of its own: make adapters-env ENVS={name}; make test-adapters. "
        f"The adapter of {name} is NOT covered"
    )


def three_steps(folder: Path, section: dict[str, Any], max_tokens: int = 4) -> RunConfig:
    """A run of the small policy, on the embedded engine, that trains three steps on one environment."""
    return RunConfig.model_validate(
        {
            "run": {"name": "t", "dir": str(folder), "max_steps": 3},
            "model": {"name": "pkg:paceline/assets/small_policy"},
            "sampling": {"max_tokens": max_tokens},
            "env": [section],
            "filters": {"zero_advantage": False},
            "engine": {"type": "embedded", "kv_tokens": 16384, "max_num_seqs": 16},
            "admission": {"type": "fixed", "cap": 16},
            "batch": {"rollouts": 8, "seq_len": 512, "micro_batch_tokens": 2048},
        }
    )
