"""What the commands that take a run config have in common: files, then overrides.

    TAKES_CONFIG = True

    def add_arguments(parser): add_config_argument(parser)
    def run(args): loaded = load_config(args)

`main` takes every flag that the command's own parser does not know for an override, and lists the config's
options below the command's own in `--help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.config.load import Loaded


def add_config_argument(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`CONFIG...`: files that are merged in order."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="+" if required else "*",
        type=Path,
        help="TOML file; a later one is laid over the earlier",
    )
    parser.usage = f"{parser.prog} [options] CONFIG... [--section.key VALUE]..."


def require_torch(command: str) -> None:
    """ConfigError, with the remedy, where the train extra is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"`paceline {command}` needs torch, which is not installed: pip install 'paceline[train]'"
        )


def positive(text: str) -> int:
    """An argument that counts something, at least one of it."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def load_config(args: argparse.Namespace, beside: Iterable[Path] = ()) -> Loaded[RunConfig]:
    """The config that the command line names. ConfigError with everything that is wrong with it. `beside`: more folders in which
    modules may lie."""
    from paceline.config import RunConfig
    from paceline.config.load import load

    # `module:Class` in a config means a module that lies beside it, or where the command was given.
    for folder in (Path.cwd(), *(path.resolve().parent for path in args.config), *beside):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return load(RunConfig, args.config, args.overrides)


def split_overrides(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the command's own parser, and the overrides.

    A flag that the parser does not know is an override, with the word behind it unless that is a flag too. So
    config files come before overrides, or a switch without a value would take one for its value.
    """
    known = {option: action for action in parser._actions for option in action.option_strings}
    own: list[str] = []
    overrides: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name = word.partition("=")[0]
        taken = own if name in known or not word.startswith("--") else overrides
        taken.append(word)
        if "=" in word or not waiting or waiting[0].startswith("--"):
            continue
        takes_value = name in known and known[name].nargs != 0
        if taken is overrides or takes_value:
            taken.append(waiting.pop(0))
    return own, overrides


def print_help(parser: argparse.ArgumentParser) -> None:
    """The command's own help, then every option of the config."""
    from paceline.config import RunConfig
    from paceline.config.reference import help_text

    color = sys.stdout.isatty()
    print(parser.format_help())
    print("config options, each also a key in the file:\n")
    print(help_text(RunConfig, color=color, width=min(shutil.get_terminal_size().columns, 120)), end="")
