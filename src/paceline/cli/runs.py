"""`paceline runs [DIR]`: the runs of a folder, or one of them: how each stands, or why it ended."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli.columns import aligned
from paceline.cli.status import how_it_stands
from paceline.errors import ConfigError, WireError, printable
from paceline.observe.sinks.jsonl import FILE as METRICS
from paceline.observe.told import seconds_text
from paceline.transport.layout import STATUS

_TAIL = 1 << 18
"""Bytes of the end of the metrics that are looked at: a line has a few thousand."""
_COLUMNS = ("run", "status", "steps", "reward", "began", "took", "why")
_REASON = 100
"""Characters of a reason in the table; `--json` has all of it."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one run stands."""

    run: str
    """Its directory."""
    status: str
    """`running`, `done`, `stopped`, `failed`, or `unreadable`."""
    reason: str = ""
    trained: int | None = None
    """Optimizer steps taken."""
    steps: int | None = None
    """Asked for."""
    reward: float | None = None
    """Mean of the newest step."""
    started: float = 0.0
    """Seconds since the epoch."""
    seconds: float | None = None
    """From the beginning of its last life to its end, or until now."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="run.dir, or one run (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON a run")


def run(args: argparse.Namespace) -> int:
    rows = rows_of(args.folder)
    if args.json:
        for row in rows:
            print(msgspec.json.encode(row).decode())
    else:
        print("\n".join(aligned([_COLUMNS, *map(_cells, rows)])))
    return 0


def rows_of(folder: Path, now: float | None = None) -> list[RunRow]:
    """Those that began first come first. ConfigError where there are none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory: name run.dir, or a run, as in `paceline runs runs`")
    found = [folder] if (folder / STATUS).exists() else [p for p in folder.iterdir() if (p / STATUS).exists()]
    if not found:
        raise ConfigError(f"there is no run in {folder}: no directory in it has a {STATUS}")
    rows = [_row(run_dir, time.time() if now is None else now) for run_dir in found]
    return sorted(rows, key=lambda row: (row.started, row.run))


def _row(run_dir: Path, now: float) -> RunRow:
    newest = _newest_step(run_dir)
    try:
        status = how_it_stands(run_dir)
    except (WireError, OSError) as error:
        return RunRow(run=str(run_dir), status="unreadable", reason=str(error), trained=newest.get("step"))
    reason = status.reason
    if status.status == "running":
        reason = f"process {status.pid} on {status.host}"
    until = now if status.status == "running" else status.ended
    return RunRow(
        run=str(run_dir),
        status=status.status,
        reason=reason,
        trained=newest.get("step") if status.trained is None else status.trained,
        steps=status.steps,
        reward=newest.get("train/all/reward"),
        started=status.started,
        seconds=None if until is None else max(0.0, until - status.started),
    )


def _newest_step(run_dir: Path) -> dict[str, Any]:
    """The metrics of the newest step; empty where there are none yet. Read from their end: a run may have a hundred thousand."""
    try:
        with open(run_dir / METRICS, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # the last is being written, or the first was cut
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            return row
    return {}


def _cells(row: RunRow) -> tuple[str, ...]:
    reason = " ".join(row.reason.split())
    cells = (
        row.run,
        row.status,
        f"{'?' if row.trained is None else row.trained}/{'?' if row.steps is None else row.steps}",
        "-" if row.reward is None else f"{row.reward:.3f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started)) if row.started else "-",
        "-" if row.seconds is None else seconds_text(row.seconds),
        reason if len(reason) <= _REASON else reason[: _REASON - 1] + "…",
    )
    return tuple([printable(cell) for cell in cells])
