"""Runs the cells of a study in processes, and writes what they came to."""

from __future__ import annotations

import csv
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread, current_thread, main_thread
from typing import Any, Final

from paceline.errors import ConfigError, InvariantError, PacelineError
from paceline.journal import read_journal
from paceline.journal.files import file_numbers
from paceline.sim.calibrate import RecordedEngines
from paceline.sim.cells import Cell, Journals, check_engines, fitted_engines, run_cell
from paceline.sim.page import page
from paceline.sim.requests import Record
from paceline.sim.study import StudyConfig, load_study

Progress = Callable[[int, int], None]
"""(cells that are done, cells in all)."""

_AHEAD: Final = 16
"""Cells a process that are handed out and not yet told of: a long one that the others are told behind keeps none of them idle."""

_BROKEN: Final = (
    "a process of the study was killed, or could not start: where memory ran out, take fewer at once (`--processes`); a script "
    'that calls paceline.simulate does so below `if __name__ == "__main__":`, since each process reads the script first'
)


def simulate(
    study: StudyConfig | str | os.PathLike[str],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    finished: Callable[[Cell], None] | None = None,
    folder: Path | None = None,
    recorded: RecordedEngines | None = None,
) -> list[Cell]:
    """Run every policy with every workload and every seed; the cells in that order.

    `study` is a config or the path of its file. `processes`: how many at once; none: as many as there are cores, and 1
    runs here. `finished` gets every cell, in that order: what there is when a later one raises, or Ctrl-C comes.
    Paths of recorded runs are meant relative to `folder`, or to the study's file. `recorded` are the engines of `engines.recorded` where
    they are fitted already (`engines_of_runs`). ConfigError when it cannot work; what a cell raises names it.
    """
    if not isinstance(study, StudyConfig):
        path = Path(study)
        folder = folder or path.parent
        study = load_study(path)
    if processes is not None and processes < 1:
        raise ConfigError(f"processes is {processes}: it takes at least 1, or None for one a core")
    study.check()
    check_engines(study)
    folder = folder or Path()
    _check_runs(study, folder)
    recorded = recorded or engines_of_runs(study, folder)
    section = study.study
    seeds = range(section.first_seed, section.first_seed + section.seeds)
    jobs = (
        (study, policy, workload, seed, folder, recorded)
        for workload in study.workload
        for policy in study.policy
        for seed in seeds
    )
    total = len(study.workload) * len(study.policy) * len(seeds)
    count = min(total, processes or os.cpu_count() or 1)
    cells: list[Cell] = []

    def add(cell: Cell) -> None:
        cells.append(cell)
        if finished is not None:
            finished(cell)
        if progress is not None:
            progress(len(cells), total)

    if count <= 1:
        for job in jobs:
            add(_run(job))
    else:
        _run_apart(jobs, count, add)
    return cells


def _run_apart(jobs: Iterator[tuple[Any, ...]], count: int, add: Callable[[Cell], None]) -> None:
    """`add` gets the cells in the order of the jobs, from `count` processes. Only as many jobs are handed out as keep these busy: a
    study may have a thousand million."""
    with processes_of(count) as pool:
        running: deque[Future[Cell]] = deque()

        def hand_out(most: int) -> None:
            with _interrupts_later():  # it may start a process
                running.extend(pool.submit(_run, job) for job in islice(jobs, most))

        try:
            hand_out(count * _AHEAD)
            while running:
                cell = running[0].result()
                running.popleft()
                add(cell)
                hand_out(1)
        except BaseException as error:
            # They would finish their cells first, which may take hours.
            for process in list(pool._processes.values()):
                process.terminate()
            for future in running:
                if future.done() and not future.cancelled() and future.exception() is None:
                    add(future.result())
            if isinstance(error, BrokenProcessPool):
                raise PacelineError(_BROKEN) from error
            raise


def processes_of(count: int) -> ProcessPoolExecutor:
    """Not forked, since whoever asks may have threads. They end with it, also when it is killed."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_end_with_the_parent)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """What is started inside never hears of Ctrl-C, of which a terminal tells all: that is the parent's to hear, when this has ended."""
    if current_thread() is not main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    # A process inherits that a signal is blocked, and not what handles it. Another thread may hear it all the same, for us.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _end_with_the_parent() -> None:
    """A process of a pool hears nothing of a parent that was killed: it would go on for hours, and then wait for ever."""
    parent = parent_process()
    if parent is None:
        raise InvariantError("only a child can end with its parent")

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, name="parent watch", daemon=True).start()


def _run(job: tuple[Any, ...]) -> Cell:
    study, policy, workload, seed, folder, recorded = job
    try:
        return run_cell(study, policy, workload, seed, _journals(folder), recorded=recorded)
    except PacelineError as error:
        cell = f"policy {policy.name!r}, workload {workload.name!r}, seed {seed}"
        raise type(error)(f"{cell}: {error}") from error


def engines_of_runs(study: StudyConfig, folder: Path) -> RecordedEngines | None:
    """The engines of `engines.recorded`, fitted; None where a study has others. ConfigError when these runs do not tell."""
    if not study.engines.recorded:
        return None
    return fitted_engines(study, _journals(folder))


def _journals(folder: Path) -> Journals:
    return lambda name: records_of(run_dir(name, folder))


def _check_runs(study: StudyConfig, folder: Path) -> None:
    """ConfigError when a directory that the study names holds no run."""
    named = [env.journal for workload in study.workload for env in workload.env if env.journal is not None]
    for name in dict.fromkeys((*study.engines.recorded, *named)):
        run_dir(name, folder)


def check_run(path: Path) -> None:
    """ConfigError when it is no directory of a run."""
    if not path.is_dir():
        raise ConfigError(f"no run at {str(path)!r}: give the directory of a run")
    if not file_numbers(path, "log"):
        raise ConfigError(f"{path} holds no journal: give the directory of a run")


def distinct(runs: Iterable[str]) -> list[Path]:
    """Their directories: a run that is named twice would count twice."""
    return list(dict.fromkeys(Path(each).resolve() for each in runs))


def records_of(*runs: Path) -> Iterator[Record]:
    """What the journals of runs hold, one after the other. WireError when there is none, or one is damaged."""
    return ((record.at, record.event, record.commands) for run in runs for record in read_journal(run))


def run_dir(name: str, folder: Path) -> Path:
    """Of a recorded run that a study names, relative to `folder` or to where the command is given. ConfigError when there is none."""
    for path in (folder / name, Path(name)):
        if path.exists():
            check_run(path)
            return path
    raise ConfigError(f"no run at {name!r}")


UNFINISHED: Final = "-part"
"""What the name of a study ends in when only some of its cells are done: their results are not to replace those of a whole one."""


def files_of(name: str, folder: Path) -> list[Path]:
    """Where the results of a study go: table, page, and the table once more for where pyarrow is installed."""
    return [folder / f"{name}.{kind}" for kind in ("csv", "html", "parquet")]


def write_study(
    study: StudyConfig, cells: Sequence[Cell], folder: Path, facts: Sequence[tuple[str, str]] = ()
) -> list[Path]:
    """Write NAME.csv and NAME.html, and NAME.parquet where pyarrow is installed; returns what was written.

    Whole files take the place of older ones, so that two studies of a name never mix in one. PacelineError when one cannot be
    written.
    """
    name = study.study.name
    columns = list(dict.fromkeys(key for cell in cells for key in cell.numbers))
    rows = [[c.policy, c.workload, c.seed, *(c.numbers.get(column) for column in columns)] for c in cells]
    columns = ["policy", "workload", "seed", *columns]
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".study-") as beside:
            drafts = files_of(name, Path(beside))
            path = folder / drafts[0].name
            _write_csv(drafts[0], columns, rows)
            path = folder / drafts[1].name
            drafts[1].write_text(page(name, cells, [*facts, *_facts(study)]), encoding="utf-8")
            path = folder / drafts[2].name
            _write_parquet(drafts[2], columns, rows)
            # A draft that is there is whole.
            written = [folder / draft.name for draft in drafts if draft.exists()]
            for path in written:
                (Path(beside) / path.name).replace(path)
    except OSError as error:
        raise PacelineError(
            f"cannot write {path}: {error.strerror or error}; make room for it, or give another folder"
        ) from error
    return written


def _write_csv(path: Path, columns: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _write_parquet(path: Path, columns: list[str], rows: list[list[Any]]) -> None:
    """Not where pyarrow is not installed."""
    try:
        import pyarrow  # type: ignore[import-not-found,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        return
    pyarrow.parquet.write_table(
        pyarrow.table({column: [row[n] for row in rows] for n, column in enumerate(columns)}), path
    )


def _facts(study: StudyConfig) -> list[tuple[str, str]]:
    e = study.engines
    kind = f"{e.gpus} {e.gpu}, {e.model}" if not e.recorded else f"as in {', '.join(e.recorded)}"
    return [
        ("engines", f"{e.count} × {kind}"),
        ("seeds", str(study.study.seeds)),
        ("batch", f"{study.batch.rollouts or study.batch.tokens}"),
    ]
