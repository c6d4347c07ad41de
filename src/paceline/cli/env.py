"""`paceline env check`: run an environment against a scripted model, and say what is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.flags import read_value
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.doctor import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check")
    check = verbs.add_parser("check", help="run it against a scripted model, and say what is wrong with it")
    check.add_argument(
        "what", metavar="CONFIG|ID", help="a run's TOML, or `module:Class`, or a built-in name"
    )
    check.add_argument(
        "--args", default="{}", metavar="TABLE", help="the constructor's arguments, with an id: TOML or JSON"
    )
    check.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="TEXT",
        help="something the model says too; repeatable",
    )
    check.add_argument("--tasks", type=int, default=3, help="tasks that are rolled out (3)")
    check.add_argument(
        "--seconds", type=float, default=120.0, help="real time that its code may take in all (120)"
    )
    check.add_argument("--json", action="store_true", help="print the findings as one JSON line")


def run(args: argparse.Namespace) -> int:
    """0 when nothing is wrong, 2 when something is."""
    from paceline.cli.checks import as_json
    from paceline.cli.doctor import render
    from paceline.envs.registry import make_environment
    from paceline.testing.check import check_environment

    worst = 0
    for label, env_id, given, size in _chosen(args.what, args.args):
        make = partial(make_environment, env_id, given)
        make()  # a ConfigError names what keeps it from being made
        found = check_environment(
            make, tasks=args.tasks, group_size=size, answers=args.answer, seconds=args.seconds
        )
        if args.json:
            print(json.dumps({"env": label, "findings": as_json(found)}))
        else:
            print(f"{label}\n{_told(render(found, color=sys.stdout.isatty()), found)}\n")
        worst = max(worst, 2 if any(finding.level == "error" for finding in found) else 0)
    return worst


def _told(text: str, found: list[Finding]) -> str:
    """`render` speaks of a run in its last line; this is about an environment."""
    errors = sum(finding.level == "error" for finding in found)
    verdict = f"{errors} thing{'s' * (errors != 1)} wrong" if errors else "nothing is wrong with it"
    return "\n".join([*text.splitlines()[:-1], verdict])


def _chosen(what: str, given: str) -> list[tuple[str, str, dict[str, Any], int | None]]:
    """(label, id, args, group size) of each environment that is named."""
    if what.endswith(".toml"):
        from paceline.config import RunConfig
        from paceline.config.load import load

        if (folder := str(Path(what).resolve().parent)) not in sys.path:
            sys.path.insert(0, folder)
        config = load(RunConfig, [Path(what)]).value
        return [(section.label, section.id, dict(section.args), section.group_size) for section in config.env]
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        args = read_value(given)
    except ValueError as error:
        raise ConfigError(f"--args {given!r} is neither TOML, as {{ a = 1 }}, nor JSON: {error}") from error
    if not isinstance(args, dict):
        raise ConfigError(f"--args {given!r}: expected a table, as {{ a = 1 }}")
    return [(what, what, args, None)]
