"""`paceline run CONFIG`: everything of one config: engine, trainer, orchestrator, live view, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import add_config_argument, load_config
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.config.load import Loaded

TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from a run directory's newest checkpoint; without RUN, the newest run of this name",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything a run needs, start nothing")
    parser.add_argument("--summary", choices=["json"], help="end the output with one line of JSON")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live panel")


def run(args: argparse.Namespace) -> int:
    from paceline.cli.checks import diagnose
    from paceline.cli.doctor import render

    loaded = load_config(args)
    findings = asyncio.run(diagnose(loaded))
    broken = any(finding.level == "error" for finding in findings)
    if args.dry_run or broken:
        print(render(findings, color=sys.stdout.isatty()), flush=True)
        return 2 if broken else 0
    for finding in findings:
        if finding.level == "warning":
            _say(f"warning: {finding.what}: {finding.facts}; {finding.remedy}")
    return _run(loaded, args)


def _run(loaded: Loaded[RunConfig], args: argparse.Namespace) -> int:
    from paceline.cli.rundir import CONFIG_FILE, latest_run_dir, new_run_dir, resumption
    from paceline.config.dump import dump
    from paceline.transport.status import open_run

    config = loaded.value
    goes_on = None
    if args.resume is None:
        run_dir, run_id = new_run_dir(config)
    else:
        run_dir = Path(args.resume) if args.resume else latest_run_dir(config)
        run_id, goes_on, notes = resumption(run_dir, config)
        for note in notes:
            _say(note)
    open_run(
        run_dir,
        run_id,
        resume_step=None if args.resume is None else (goes_on.step if goes_on else 0),
        steps=config.run.max_steps,
    )
    (run_dir / CONFIG_FILE).write_text(dump(config, loaded.provenance), encoding="utf-8")
    summary, code = execute(config, run_dir, run_id, goes_on, plain=args.plain)
    if args.summary == "json":
        print(json.dumps(summary), flush=True)
    return code


def execute(
    config: RunConfig, run_dir: Path, run_id: str, goes_on: Any = None, *, plain: bool = False
) -> tuple[dict[str, Any], int]:
    """Run in an opened run directory: the summary, and the exit code. Errors are told and become the status."""
    from paceline.cli.assemble import Assembly, StoppedTwice
    from paceline.cli.status import StatusFile
    from paceline.observe.live import open_view
    from paceline.observe.monitor import Monitor
    from paceline.observe.run import RunFolds, summary
    from paceline.observe.sinks import open_sinks
    from paceline.observe.sinks.pump import SinkPump

    began = time.monotonic()
    folds = RunFolds(live=True)
    with StatusFile(run_dir, run_id=run_id, steps=config.run.max_steps) as status:
        pump = SinkPump(
            open_sinks(run_dir, config.metrics, run_name=run_dir.name, config=config.model_dump(mode="json"))
        )
        assembly = Assembly(config, run_dir, run_id, goes_on, status=status)
        view = open_view(
            folds, sys.stderr, max_steps=config.run.max_steps, cap=lambda: assembly.cap, plain=plain
        )
        error: BaseException | None = None
        try:
            with Monitor(folds, pump=pump, view=view) as monitor:
                finish = asyncio.run(assembly.run([monitor], _say))
            code = status.finish(finish.status, finish.reason)
        except StoppedTwice as stopped:
            status.finish("stopped", str(stopped))
            error, code = stopped, 130
        except PacelineError as failure:
            error, code = failure, status.fail(failure)
        _write_report(run_dir)
    if error is not None:
        print(f"error: {status.status.reason}", file=sys.stderr, flush=True)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr, flush=True)
    _say(f"{status.status.status}: {run_dir}")
    told = summary(folds, wall_s=time.monotonic() - began)
    told |= {"run_dir": str(run_dir), "status": status.status.status, "reason": status.status.reason}
    return told, code


def _write_report(run_dir: Path) -> None:
    """The report is a fold over the journal: if it cannot be made, the run stands all the same."""
    from paceline.cli.report import make_report

    try:
        _say(f"report: {make_report(run_dir)}")
    except (PacelineError, OSError) as error:
        _say(f"no report: {error}; try again with: paceline report {run_dir}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)



