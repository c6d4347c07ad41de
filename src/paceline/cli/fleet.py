"""`paceline engines RUN`: which servers a run uses; add one, or take one out, while it goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.engine_list import FILE, checked, read_list, write_list
from paceline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--add", action="append", default=[], metavar="URL", help="use this server, too")
    parser.add_argument(
        "--remove", action="append", default=[], metavar="URL", help="send it nothing more; its calls may end"
    )


def run(args: argparse.Namespace) -> int:
    if not (args.run / FILE).exists():
        raise ConfigError(
            f"{args.run} has no {FILE}: it is no run directory, or the run's engines are processes of its own"
        )
    addresses = dict.fromkeys(read_list(args.run))
    for given in args.remove:
        address = checked(given, "--remove")
        if address not in addresses:
            raise ConfigError(f"--remove {given}: the run does not use it; it uses {', '.join(addresses)}")
        del addresses[address]
    for given in args.add:
        addresses[checked(given, "--add")] = None
    if not addresses:
        raise ConfigError("that would leave the run without an engine; stop it with Ctrl-C if it should end")
    if args.add or args.remove:
        write_list(args.run, tuple(addresses))
    print("\n".join(addresses))
    return 0
