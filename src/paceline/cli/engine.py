"""`paceline engine`: one embedded engine, as a process of its own."""

from __future__ import annotations

import argparse

from paceline.cli.options import require_torch
from paceline.engines.embedded import __main__ as process
from paceline.engines.embedded.options import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    EngineOptions.add_arguments(parser)
    process.add_arguments(parser)
    # By itself it outlives the shell that started it, as a server does; a run's engine ends with the run.
    parser.set_defaults(exit_with_parent=False)


def run(args: argparse.Namespace) -> int:
    require_torch("engine")
    return process.run(args)
