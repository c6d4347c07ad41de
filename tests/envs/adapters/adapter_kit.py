"""Interpreters that have an environment package, for tests of its adapter: `PACELINE_ADAPTERS` names their folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
        f"needs {package}: python -m venv DIR/{name}; DIR/{name}/bin/pip install msgspec numpy pydantic {package}; "
        f"PACELINE_ADAPTERS=DIR"
    )
