"""`paceline simulate`: scheduling policies on modelled engines, before anything is rented.

paceline simulate STUDY.toml
paceline simulate --from RUN                       a recorded run as it was, and what if its cap were another
paceline simulate STUDY.toml --from RUN            its rollouts instead of the study's workloads
paceline simulate STUDY.toml --engines-from RUN    its engines, as their requests tell, instead of a model on a GPU
paceline simulate --list                           the models, GPUs and workloads that Paceline knows
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread

from pydantic import ValidationError
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.cli.options import positive
from paceline.cli.studies import (
    UNFINISHED,
    check_run,
    distinct,
    engines_of_runs,
    files_of,
    records_of,
    simulate,
    write_study,
)
from paceline.cli.what_if import study_of_run, workload_of_run
from paceline.errors import ConfigError, printable
from paceline.sim.calibrate import RecordedEngines
from paceline.sim.cells import Cell
from paceline.sim.engine import GPUS, MODELS
from paceline.sim.page import NUMBERS, PAIRED, against_first, number, table
from paceline.sim.study import StudyConfig, load_study, problems_of
from paceline.sim.workloads import PRESETS, Recorded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "study",
        metavar="STUDY",
        nargs="?",
        help="a study file (examples/studies has some); with --from it may be left out",
    )
    parser.add_argument(
        "--from",
        dest="recorded",
        metavar="RUN",
        help="directory of a run whose rollouts are rolled out again. Without STUDY also its engines, trainer and policy are "
        "modelled: as recorded, and with half and twice its cap where that is fixed",
    )
    parser.add_argument(
        "--engines-from",
        metavar="RUN",
        action="append",
        default=[],
        help="directory of a run whose engines are taken, fitted as `paceline calibrate` does; may be repeated: other loads of the same "
        "engines tell more",
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="seeds, instead of the study's number")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="only this policy; may be repeated"
    )
    parser.add_argument("--processes", type=positive, metavar="N", help="cells at once (default: one a core)")
    parser.add_argument(
        "--out", metavar="DIR", default="studies", help="where the table and the page go (default: studies)"
    )
    parser.add_argument("--list", action="store_true", help="what can be named in a study")


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list()
        return 0
    try:
        study, folder, recorded = _study(args)
        study = _chosen(study, args)
    except ValidationError as error:  # of what the options change
        raise ConfigError("; ".join(problems_of(error))) from error
    out = _folder(args.out, study.study.name)
    console = Console()
    recorded = recorded or engines_of_runs(study, folder)
    if recorded is not None:
        _say_fit(study, recorded, console)
    began = time.monotonic()
    cells: list[Cell] = []
    total = len(study.workload) * len(study.policy) * study.study.seeds
    try:
        with (
            _ending_at_sigterm(),
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
            ) as bar,
        ):
            task = bar.add_task(study.study.name, total=total)
            simulate(
                study,
                processes=args.processes,
                progress=lambda done, _: bar.update(task, completed=done),
                finished=cells.append,
                folder=folder,
                recorded=recorded,
            )
    except BaseException:
        if cells:  # they may have taken hours
            _write(_unfinished(study), cells, out, console, began)
            console.print(f"the study did not come to its end: {len(cells):,} of {total:,} cells")
        raise
    _write(study, cells, out, console, began)
    return 0


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """SIGTERM, by which clusters end a job, ends the study as Ctrl-C does."""
    if current_thread() is not main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unfinished(study: StudyConfig) -> StudyConfig:
    """The same, by the name under which the cells go that were done when it ended early."""
    named = study.study.model_copy(update={"name": study.study.name + UNFINISHED})
    return study.model_copy(update={"study": named})


def _write(study: StudyConfig, cells: list[Cell], out: Path, console: Console, began: float) -> None:
    """Write what there is, and show it."""
    try:
        written = write_study(study, cells, out)
    finally:  # what cannot be written is shown all the same: it may have taken hours
        for workload in dict.fromkeys(cell.workload for cell in cells):
            for shown in _tables(cells, workload, console.width):
                console.print(shown)
    rollouts = sum(cell.numbers["rollouts"] for cell in cells)
    took = time.monotonic() - began
    files = printable(", ".join(map(str, written)))
    console.print(
        f"{len(cells):,} cells, {rollouts:,.0f} rollouts in {took:.1f} s; written: {files}",
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def _study(args: argparse.Namespace) -> tuple[StudyConfig, Path, RecordedEngines | None]:
    """The study, the folder that its paths are relative to, and its engines where they are fitted already."""
    engines_from = distinct(args.engines_from)
    if args.study is None:
        if args.recorded is None:
            raise ConfigError(
                "name a study file, paceline simulate STUDY.toml (examples/studies has some), or a recorded run, "
                "paceline simulate --from RUN"
            )
        for run in (Path(args.recorded), *engines_from):
            check_run(run)
        study, recorded = study_of_run(Path(args.recorded), engines_from)
        return study, Path(), recorded
    path = Path(args.study)
    study = load_study(path)
    if engines_from:
        changes: dict[str, object] = {"recorded": tuple(map(str, engines_from))}
        study = study.model_copy(update={"engines": study.engines.model_copy(update=changes)})
    if args.recorded is not None:
        run = Path(args.recorded)
        check_run(run)
        workload = workload_of_run(run, Recorded.of(records_of(run)))
        study = study.model_copy(update={"workload": (workload,)})
    return study, path.parent, None


def _say_fit(study: StudyConfig, recorded: RecordedEngines, console: Console) -> None:
    """How good the fit of recorded engines is, and what it could not tell."""
    found = recorded.calibration
    console.print(
        f"engines of {', '.join(study.engines.recorded)}: the fit is {found.total_error:+.1%} off in the seconds that it was not fitted "
        f"to, and {found.error:.1%} of a request on the mean",
        highlight=False,
        soft_wrap=True,
    )
    if untold := recorded.calibration.untold:
        console.print(
            f"not told what {', '.join(untold)} costs: the loads of {', '.join(study.engines.recorded)} cannot tell it from the rest, and "
            "other loads may come out wrong (docs/simulator.md, Calibration)",
            highlight=False,
            soft_wrap=True,
        )


def _folder(name: str, study: str) -> Path:
    """Where the results go; made before there are any, which may take hours."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {name!r} is no directory, and none can be made there: {error}") from error
    for path in files_of(study, folder):
        if path.is_dir():
            raise ConfigError(
                f"{path} is a directory, and the results go there: move it, or give another --out"
            )
    return folder


def _chosen(study: StudyConfig, args: argparse.Namespace) -> StudyConfig:
    """What the other options leave of it."""
    changes: dict[str, object] = {}
    if args.seeds is not None:
        changes["study"] = study.study.model_copy(update={"seeds": args.seeds})
    if args.policy:
        known = [policy.name for policy in study.policy]
        for name in args.policy:
            if name not in known:
                raise ConfigError(f"the study has no policy {name!r}; there are {', '.join(known)}")
        changes["policy"] = tuple(policy for policy in study.policy if policy.name in args.policy)
    chosen = study.model_copy(update=changes)
    # The copy is what is used: it still tells what was said from what was left out.
    StudyConfig.model_validate(chosen.model_dump())
    return chosen


_NARROWEST, _TITLES = 10, 37
"""Widths: of a number with its interval; of the column of titles, with its lines."""


def _tables(cells: list[Cell], workload: str, width: int) -> Iterator[Table]:
    """A number a row and a policy a column, since there are more numbers than a terminal is wide; as many policies in a table as it has
    room for."""
    rows, paired = table(cells, workload), against_first(cells, workload)
    column = max(_NARROWEST, *(cell_len(printable(policy)) for policy, _ in rows)) + 3
    at_once = max(1, (width - _TITLES) // column)
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        shown = Table(title=_text(workload), title_justify="left")
        shown.add_column("", no_wrap=True)
        for policy, _ in some:
            shown.add_column(_text(policy), justify="right", no_wrap=True)
        for name, each in NUMBERS.items():
            if any(name in found for _, found in rows):
                shown.add_row(each.title, *(number(f[name].mean, name) if name in f else "" for _, f in some))
        for name, by_policy in paired.items():
            if name in ("goodput", "step_s"):
                ratios = [by_policy.get(policy) for policy, _ in some]
                told = [f"{r.mean:.2f} ±{r.half:.2f}" if r else "" for r in ratios]
                shown.add_row(PAIRED[name], *(["1", *told[1:]] if first == 0 else told))
        yield shown


def _text(name: str) -> Text:
    """A name of the study's as it is: what looks like markup is none."""
    return Text(printable(name))


def _list() -> None:
    for what, names in (("models", MODELS), ("gpus", GPUS), ("workloads", PRESETS)):
        print(f"{what:<10} {', '.join(names)}")
