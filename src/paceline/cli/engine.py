"""`paceline engine`: one embedded engine, as a process of its own."""

from __future__ import annotations

import argparse

from paceline.engines.embedded import __main__ as process
from paceline.engines.embedded.options import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    EngineOptions.add_arguments(parser)
    process.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return process.run(args)
