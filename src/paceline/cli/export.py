"""`paceline export RUN`: a run's spans for a trace viewer, its metrics and its rollouts as tables."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from paceline.cli.options import positive
from paceline.cli.parquet import write_parquet
from paceline.cli.report import fold
from paceline.cli.rollouts import DROPPED
from paceline.errors import ConfigError, PacelineError
from paceline.journal import dropped_before
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds
from paceline.observe.trace import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Chrome trace JSON for Perfetto, speedscope or chrome://tracing; gzipped when FILE ends in .gz",
    )
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="every row of metrics as CSV")
    parser.add_argument(
        "--parquet",
        type=Path,
        metavar="DIR",
        help="rollouts.parquet and turns.parquet, with token arrays, for DuckDB, Polars or pandas",
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="only the last N steps in the trace; all when left out"
    )


def run(args: argparse.Namespace) -> int:
    if args.trace is None and args.metrics is None and args.parquet is None:
        raise ConfigError("nothing to export: give --trace FILE, --metrics FILE, --parquet DIR, or several")
    try:
        if args.parquet is not None:
            rollouts, turns, bare = write_parquet(args.run, args.parquet)
            print(f"{args.parquet}: {rollouts} rollouts, {turns} turns")
            if bare:
                why = (
                    f"{DROPPED} of them" if dropped_before(args.run) else "they are not in the rollout store"
                )
                print(f"{bare} rollouts have no turns: {why}")
        if args.trace is not None or args.metrics is not None:
            _write(args, fold(args.run, timeline_steps=args.steps))
    except OSError as error:
        raise PacelineError(f"cannot write {error.filename}: {error.strerror}; name another file") from error
    return 0


def _write(args: argparse.Namespace, folds: RunFolds) -> None:
    if args.trace is not None:
        count = write_trace(folds.spans, args.trace)
        print(f"{args.trace}: {count} trace events")
    if args.metrics is not None:
        count = write_csv(folds, args.metrics)
        print(f"{args.metrics}: {count} rows")


def write_csv(folds: RunFolds, path: Path) -> int:
    """One line a row, one column a metric, empty where a row lacks it; returns the number of rows."""
    rows: list[Row] = sorted((*folds.training.steps, *folds.training.evals), key=lambda row: row.at)
    names = sorted({name for row in rows for name in row.values})
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["kind", "segment", "step", "env", "at", *names])
        for row in rows:
            values = [row.values.get(name, "") for name in names]
            table.writerow([row.kind, row.segment, row.step, row.env, row.at, *values])
    return len(rows)
