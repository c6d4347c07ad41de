"""`paceline simulate`: scheduling policies on modelled engines, before anything is rented.

paceline simulate STUDY.toml
paceline simulate STUDY.toml --from RUN        the rollouts of a recorded run instead of the study's workloads
paceline simulate STUDY.toml --engines-from RUN    its engines, as their requests tell, instead of a model on a GPU
paceline simulate --list                       the models, GPUs and workloads that Paceline knows
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cli.studies import simulate, write_study
from paceline.errors import ConfigError
from paceline.sim.cells import Cell
from paceline.sim.engine import GPUS, MODELS
from paceline.sim.page import COLUMNS, number, table
from paceline.sim.study import StudyConfig, load_study
from paceline.sim.workloads import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", nargs="?", help="a study file (examples/studies has some)")
    parser.add_argument(
        "--from",
        dest="recorded",
        metavar="RUN",
        help="directory of a run whose rollouts are rolled out again",
    )
    parser.add_argument(
        "--engines-from",
        metavar="RUN",
        help="directory of a run whose engines are taken, fitted as `paceline calibrate` does",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds, instead of the study's number")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="only this policy; may be repeated"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="cells at once (default: one a core)")
    parser.add_argument(
        "--out", metavar="DIR", default="studies", help="where the table and the page go (default: studies)"
    )
    parser.add_argument("--list", action="store_true", help="what can be named in a study")


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list()
        return 0
    if args.study is None:
        raise ConfigError("name a study file: paceline simulate STUDY.toml (examples/studies has some)")
    path = Path(args.study)
    study = _chosen(load_study(path), args)
    out = _folder(args.out)
    console = Console()
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task(study.study.name, total=None)
        cells = simulate(
            study,
            processes=args.processes,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            folder=path.parent,
        )
    for workload in dict.fromkeys(cell.workload for cell in cells):
        console.print(_table(cells, workload))
    written = write_study(study, cells, out)
    rollouts = sum(cell.numbers["rollouts"] for cell in cells)
    took = time.monotonic() - began
    console.print(f"{rollouts:,.0f} rollouts in {took:.1f} s; written: {', '.join(map(str, written))}")
    return 0


def _folder(name: str) -> Path:
    """Where the results go; made before there are any, which may take hours."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {name!r} is no directory, and none can be made there: {error}") from error
    return folder


def _chosen(study: StudyConfig, args: argparse.Namespace) -> StudyConfig:
    changes: dict[str, object] = {}
    data = study.model_dump()
    if args.seeds is not None:
        changes["study"] = data["study"] | {"seeds": args.seeds}
    if args.policy:
        known = [policy.name for policy in study.policy]
        for name in args.policy:
            if name not in known:
                raise ConfigError(f"the study has no policy {name!r}; there are {', '.join(known)}")
        changes["policy"] = [p for p in data["policy"] if p["name"] in args.policy]
    for named in (args.recorded, args.engines_from):
        if named is not None and not Path(named).is_dir():
            raise ConfigError(f"no run at {named!r}: give the directory of a run")
    if args.engines_from is not None:
        changes["engines"] = data["engines"] | {"recorded": str(Path(args.engines_from).resolve())}
    if args.recorded is not None:
        sizes = {env.group_size for workload in study.workload for env in workload.env}
        if len(sizes) > 1:
            raise ConfigError(f"the study has groups of {sorted(sizes)}: for --from, keep one workload")
        env = {"journal": str(Path(args.recorded).resolve()), "group_size": sizes.pop()}
        changes["workload"] = [{"name": Path(args.recorded).name, "env": [env]}]
    return StudyConfig.model_validate(data | changes) if changes else study


def _table(cells: list[Cell], workload: str) -> Table:
    """A number a row and a policy a column: there are more numbers than a terminal is wide."""
    rows = table(cells, workload)
    shown = Table(title=workload, title_justify="left")
    shown.add_column("")
    for policy, _ in rows:
        shown.add_column(policy, justify="right")
    for name, title in COLUMNS.items():
        if any(name in found for _, found in rows):
            shown.add_row(title, *(number(f[name].mean, name) if name in f else "" for _, f in rows))
    return shown


def _list() -> None:
    for what, names in (("models", MODELS), ("gpus", GPUS), ("workloads", PRESETS)):
        print(f"{what:<10} {', '.join(names)}")
