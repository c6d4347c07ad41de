"""`paceline engine`: one embedded engine, as a process of its own."""

from __future__ import annotations

import argparse
import importlib.util

from paceline.engines.embedded import __main__ as process
from paceline.engines.embedded.options import EngineOptions
from paceline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    EngineOptions.add_arguments(parser)
    process.add_arguments(parser)
    # By itself it outlives the shell that started it, as a server does; a run's engine ends with the run.
    parser.set_defaults(exit_with_parent=False)


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "`paceline engine` needs torch, which is not installed: pip install 'paceline[train]'"
        )
    return process.run(args)
