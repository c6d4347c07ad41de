"""`paceline report RUN`: one HTML file about a finished or live run, from its journal alone."""

from __future__ import annotations

import argparse
import json
import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.cli.disk import disk_use
from paceline.cli.options import positive
from paceline.cli.rollouts import DROPPED
from paceline.domain.rollout import Message
from paceline.errors import PacelineError
from paceline.journal import dropped_before, read_journal, read_rollouts
from paceline.observe.report import Extras, render
from paceline.observe.run import RunFolds, summary

REPORT = "report.html"
CONFIG = "config.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to write the report; RUN/{REPORT} when left out",
    )
    parser.add_argument(
        "--timeline-steps",
        type=positive,
        default=4,
        metavar="N",
        help="steps that the timeline shows, the last ones (default: %(default)s)",
    )
    parser.add_argument("--summary", choices=["json"], help="end the output with one line of JSON")


def run(args: argparse.Namespace) -> int:
    folds = fold(args.run, timeline_steps=args.timeline_steps)
    try:
        print(write_report(args.run, folds, args.output))
    except OSError as error:
        where = args.output or args.run / REPORT
        raise PacelineError(
            f"the report cannot be written to {where}: {error.strerror}; name another place with -o"
        ) from error
    if args.summary == "json":
        print(json.dumps(summary(folds) | {"run_dir": str(args.run)}))
    return 0


def make_report(run_dir: Path) -> Path:
    """Write RUN/report.html; returns its path. WireError when there is no journal, OSError from the disk."""
    return write_report(run_dir, fold(run_dir))


def fold(run_dir: Path, *, timeline_steps: int | None = 4) -> RunFolds:
    """Everything the journal of a run tells. WireError when there is none, or it is damaged."""
    folds = RunFolds(timeline_steps=timeline_steps)
    folds.read(read_journal(run_dir))
    return folds


def write_report(run_dir: Path, folds: RunFolds, output: Path | None = None) -> Path:
    """Write the report of what was folded, all at once: a reader never sees half a file."""
    path = output or run_dir / REPORT
    page = render(folds, _extras(run_dir, folds))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _extras(run_dir: Path, folds: RunFolds) -> Extras:
    config = _text(run_dir / CONFIG)
    wanted = [rollout.id for _, rollout in folds.conversations.picks()]
    stored = {rollout.id: rollout for rollout in read_rollouts(run_dir, wanted)} if wanted else {}
    if dropped_before(run_dir):
        gone = (Message("", f"{DROPPED} of it"),)
        for _, rollout in folds.conversations.picks():
            stored.setdefault(rollout.id, msgspec.structs.replace(rollout, messages=gone))
    now = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return Extras(
        name=run_dir.resolve().name,
        facts=(*_facts(config), ("disk", str(disk_use(run_dir)))),
        status=_status(run_dir) if folds.run.status is None else None,
        messages=stored,
        config=config,
        footer=f"Made by Paceline {__version__} on {now} from the journal of run {folds.run.run_id}.",
    )


def _facts(config: str) -> tuple[tuple[str, str], ...]:
    """What a reader wants to know of the config at first sight; nothing of one that cannot be read."""
    try:
        tree = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return ()
    batch = _section(tree, "batch")
    size = f"{batch['tokens']} tokens" if isinstance(batch.get("tokens"), int) else batch.get("rollouts")
    facts = (
        ("model", _section(tree, "model").get("name")),
        ("algorithm", _section(tree, "algorithm").get("name")),
        ("batch", f"{size} rollouts" if isinstance(size, int) else size),
        ("lag", _section(tree, "scheduling").get("lag")),
    )
    return tuple((name, str(value)) for name, value in facts if value not in (None, "none", ""))


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _status(run_dir: Path) -> tuple[str, str] | None:
    """How a run stands whose journal does not say: it goes on, or was killed."""
    from paceline.cli.status import how_it_stands

    try:
        status = how_it_stands(run_dir)
    except PacelineError:
        return None
    return status.status, status.reason or ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
