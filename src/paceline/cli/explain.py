"""`paceline explain RUN WHAT`: why a rollout waited, was parked, dropped or trained; from the journal."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from paceline.cli.rollouts import DROPPED
from paceline.domain.events import RolloutEnded
from paceline.domain.ids import parse_rollout_id
from paceline.errors import ConfigError, InvariantError, printable
from paceline.journal import dropped_before, read_journal
from paceline.observe.explain import Subject, explain

_GROUP = re.compile(r"g(?:roup )?(\d+)")
_STEP = re.compile(r"step ?(\d+)")
_TASK = re.compile(r"([\w.:-]+)/(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a rollout (g12.m3.a0), a group (g12), a task (ENV/INDEX) or a step (step7)",
    )


def run(args: argparse.Namespace) -> int:
    subject = subject_of(args.what)
    found, since = 0, dropped_before(args.run)
    dropped = 0
    for record in read_journal(args.run):
        for at, text in explain([record], subject):
            found += 1
            print(f"[{at:10.2f}s] {printable(text)}")
        if record.seq < since and isinstance(record.event, RolloutEnded):
            dropped += subject.has(record.event.rollout.id)
    if not found:
        raise ConfigError(f"{args.run}: the journal tells nothing of {args.what!r}")
    if dropped:
        print(f"{DROPPED} of {dropped} of these rollouts")
    return 0


def subject_of(what: str) -> Subject:
    """ConfigError when it is none of the forms."""
    if match := _GROUP.fullmatch(what):
        return Subject(group=int(match[1]))
    if match := _STEP.fullmatch(what):
        return Subject(step=int(match[1]))
    if match := _TASK.fullmatch(what):
        return Subject(task=(match[1], int(match[2])))
    try:
        return Subject(rollout=parse_rollout_id(what))
    except (InvariantError, ValueError) as error:
        raise ConfigError(
            f"{what!r} is no rollout (g12.m3.a0), group (g12), task (ENV/INDEX) or step (step7)"
        ) from error
