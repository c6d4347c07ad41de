"""The `paceline` command: finds the subcommand, runs it, and turns an error into one line and an exit code.

A command is a module of this package with `add_arguments(parser)` and `run(args) -> int`; one that takes a run
config and overrides (`paceline run CONFIG --batch.seq-len 4096`) also says `TAKES_CONFIG = True`, or which of its
verbs do; see `options`. It is imported only when it is asked for, so that `paceline --help` stays quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from paceline import __version__
from paceline.errors import ConfigError, PacelineError, printable

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("paceline.cli.run", "run everything one config describes: engines, environments, training"),
    "doctor": ("paceline.cli.doctor", "check what a run needs before it starts, with the remedy"),
    "init": ("paceline.cli.init", "make a package with an environment of your own, which trains as it is"),
    "env": ("paceline.cli.env", "check an environment: run it against a scripted model"),
    "eval": ("paceline.cli.eval", "measure another model in a config's evals: a chat endpoint plays them"),
    "capacity": ("paceline.cli.capacity", "how many rollouts fit: the KV arithmetic of a model and a GPU"),
    "simulate": ("paceline.cli.simulate", "scheduling policies on modelled engines, in virtual time"),
    "calibrate": ("paceline.cli.calibrate", "the engine model's constants, fitted to a recorded run"),
    "runs": ("paceline.cli.runs", "the runs of a folder: how each stands, or why it ended"),
    "report": ("paceline.cli.report", "write the report of a finished or live run"),
    "explain": ("paceline.cli.explain", "why a rollout waited, was parked, dropped or trained"),
    "rollouts": (
        "paceline.cli.rollouts",
        "a table of a run's rollouts, or one of them with its conversation and tokens",
    ),
    "replay": ("paceline.cli.replay", "decide a journal's events again, and name the first difference"),
    "export": (
        "paceline.cli.export",
        "write a run's spans for a trace viewer, its metrics and rollouts as tables",
    ),
    "config": ("paceline.cli.config", "show the resolved config, the reference of options, the JSON schema"),
    "engines": ("paceline.cli.fleet", "which servers a run uses; add one or take one out while it goes on"),
    "engine": ("paceline.cli.engine", "one inference engine, as a process of its own"),
    "trainer": ("paceline.cli.trainer", "the reference trainer, as a process of its own"),
}
"""Name -> module, one line of help. In the order of `--help`."""

_EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "prometheus_client": "prometheus",
    "wandb": "wandb",
    "tensorboardX": "tensorboard",
    "ray": "ray",
    "pyarrow": "parquet",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0 done, 2 the user must change something, 1 any other failure."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("PACELINE_DEBUG", "") not in ("", "0")
    try:
        return _dispatch([word for word in words if word != "--debug"])
    except PacelineError as error:
        if debug:
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130  # as a shell reports a process that SIGINT ended
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Point stdout elsewhere, or the flush at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_standard_streams() -> None:
    """Where this was started without them (`>&-`, some service managers): else the first files that are opened take their numbers, and
    get what this process and its children print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"paceline {__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(_unknown_command(name))
    module = import_command(name)
    parser = _Parser(prog=f"paceline {name}", description=COMMANDS[name][1], allow_abbrev=False)
    module.add_arguments(parser)
    rest = words[1:]
    overrides: list[str] = []
    takes_config = getattr(module, "TAKES_CONFIG", False)
    if takes_config is True and ("-h" in rest or "--help" in rest):
        from paceline.cli.options import print_help

        print_help(parser)
        return 0
    if takes_config is True or (takes_config and rest and rest[0] in takes_config):
        from paceline.cli.options import split_overrides

        rest, overrides = split_overrides(parser, rest)
    try:
        args = parser.parse_args(rest)
    except SystemExit as done:  # --help of a command without a config
        return int(done.code or 0)
    args.overrides = overrides
    from paceline.cli.logs import log_printably

    log_printably()
    code: int = module.run(args)
    return code


def import_command(name: str) -> ModuleType:
    """The module behind a command. PacelineError if it, or a package it needs, is not installed."""
    path = COMMANDS[name][0]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if error.name == path:
            raise PacelineError(f"this installation has no `paceline {name}`: {path} is missing") from error
        if missing in _EXTRAS:
            remedy = f"pip install 'paceline[{_EXTRAS[missing]}]'"
            raise ConfigError(
                f"`paceline {name}` needs {missing}, which is not installed: {remedy}"
            ) from error
        raise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: paceline COMMAND ...",
        "",
        "The rollout orchestrator of RL post-training.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "options:",
        "  --version  print the version",
        "  --debug    show the traceback of an error (or set PACELINE_DEBUG=1)",
        "",
        "`paceline COMMAND --help` lists what a command takes.",
    ]
    return "\n".join(lines)


def _unknown_command(name: str) -> str:
    from difflib import get_close_matches

    if name.startswith("-"):
        return f"unknown option {name}; the command comes first: paceline COMMAND ..."
    near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `paceline {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"
