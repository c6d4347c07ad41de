"""Environments that other packages, servers and data sets bring. None is imported unless a config names it."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import ConfigError


def needed(module: str, extra: str) -> Any:
    """A package that an adapter stands on. ConfigError, with the remedy, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs {error.name or module}, which is not installed here: "
            f"pip install 'paceline[{extra}]', or name an interpreter that has it: workers.python"
        ) from error
