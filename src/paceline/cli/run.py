"""`paceline run CONFIG`: everything of one config: engine, trainer, orchestrator, live view, report."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paceline.cli.open_files import allow_open_files
from paceline.cli.options import add_config_argument, load_config
from paceline.errors import ConfigError, PacelineError, WireError, printable

if TYPE_CHECKING:
    from paceline.cli.assemble import Earlier
    from paceline.cli.resume import Resumption
    from paceline.config import RunConfig
    from paceline.config.load import Loaded
    from paceline.observe.run import RunFolds
    from paceline.observe.waiting import TrainerAwaited
    from paceline.runtime.driver import Fold

TAKES_CONFIG = True

_CHECK_S = 30.0


class Outcome(NamedTuple):
    """How a run ended."""

    summary: dict[str, Any]
    code: int
    """For the process."""
    error: BaseException | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser, required=False)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on with the run in directory RUN, by its own config where no CONFIG is given; without RUN, with the newest run of "
        "this name",
    )
    parser.add_argument(
        "--forgive",
        action="append",
        metavar="ENV",
        help="with --resume: draw the tasks of ENV again that are in quarantine; `all` for those of all environments; "
        "may be given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything a run needs, start nothing")
    parser.add_argument("--summary", choices=["json"], help="end the output with one line of JSON")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live panel")


def run(args: argparse.Namespace) -> int:
    from paceline.cli.checks import diagnose
    from paceline.cli.doctor import render
    from paceline.cli.stopping import leave_with

    if args.config:
        loaded = load_config(args)
    else:
        from paceline.cli.rundir import sources_behind

        args.config, beside = config_of(args.resume)
        loaded = load_config(args, beside)
        loaded = replace(loaded, provenance=sources_behind(args.config[0], loaded.provenance))
    if args.dry_run:
        findings = asyncio.run(diagnose(loaded))
        print(render(findings, color=sys.stdout.isatty()), flush=True)
        return 2 if any(finding.level == "error" for finding in findings) else 0
    if args.resume is not None:
        from paceline.cli.paused import resume_paused

        asyncio.run(resume_paused(loaded.value, args.resume, _say))
    check(loaded)
    forgives = forgiven(loaded.value, args.resume, args.forgive)
    outcome = start(loaded, resume=args.resume, forgives=forgives, plain=args.plain, may_exit=True)
    if args.summary == "json":
        print(json.dumps(outcome.summary), flush=True)
    leave_with(outcome.code)
    return outcome.code


def config_of(resume: str | None) -> tuple[list[Path], list[Path]]:
    """What stands for CONFIG where none is given: the config that the run keeps, and the folders of the files it was made of, in which
    its modules may lie. ConfigError where `--resume` names no run."""
    from paceline.cli.rundir import CONFIG_FILE, folders_of

    if not resume:
        raise ConfigError(
            "no CONFIG is given: `paceline run CONFIG`; only `paceline run --resume RUN` does without, and takes that of the run"
        )
    given = Path(resume).expanduser()
    if given.is_file():
        raise ConfigError(
            f"--resume: {resume} is a file, not a run directory: for a config, `paceline run {resume} --resume`"
        )
    kept = given / CONFIG_FILE
    if not kept.is_file():
        raise ConfigError(f"--resume: there is no run in {given.absolute()}: it has no {CONFIG_FILE}")
    return [kept], folders_of(kept)


def forgiven(config: RunConfig, resume: str | None, names: list[str] | None) -> tuple[str, ...]:
    """Environments that `--forgive` names. ConfigError where there is nothing to forgive."""
    if names is None:
        return ()
    if resume is None:
        raise ConfigError(
            "--forgive is of a run that goes on, and this one begins: add --resume, or leave it out"
        )
    known = [env.label for env in config.env]
    if names == ["all"] and "all" not in known:
        return tuple(known)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--forgive: there is no environment {name!r}, only {', '.join(map(repr, known))}; or `all`, alone"
            )
    return tuple(names)


def check(loaded: Loaded[RunConfig]) -> None:
    """Look at everything the run needs, before anything is started. ConfigError with all that would keep it from it."""
    from paceline.cli.checks import diagnose

    # More patience than the doctor has: what a busy machine did not find out in time would be found out in the run.
    findings = asyncio.run(diagnose(loaded, limit_s=_CHECK_S))
    for finding in findings:
        if finding.level == "warning":
            _say(f"warning: {'; '.join(filter(None, (finding.what, finding.facts, finding.remedy)))}")
    broken = [
        ": ".join(filter(None, (finding.what, finding.facts, finding.remedy)))
        for finding in findings
        if finding.level == "error"
    ]
    if len(broken) == 1:
        raise ConfigError(broken[0])
    if broken:
        raise ConfigError("\n  ".join([f"{len(broken)} things keep this run from starting:", *broken]))


def start(
    loaded: Loaded[RunConfig],
    *,
    resume: str | None = None,
    forgives: tuple[str, ...] = (),
    plain: bool = False,
    may_exit: bool = False,
) -> Outcome:
    """Run in a new directory, or go on in one: `resume` names it, "" for the newest of this name.

    ConfigError when it cannot begin; whatever ends it after that is told, and in the outcome. `may_exit`: see
    `Assembly`.
    """
    from paceline.cli.changes import changes_since
    from paceline.cli.resume import resumption
    from paceline.cli.rundir import RunLock, existing_run_dir, keep_config, mend_status, new_run_dir
    from paceline.config.dump import dump
    from paceline.tokens.tokenizer import resolve_model_dir
    from paceline.transport.status import open_run

    config = loaded.value
    allow_open_files()
    resolve_model_dir(config.model.name)  # fetches it if need be: before there is a directory
    goes_on: Resumption | None = None
    with ExitStack() as stack:
        if resume is None:
            run_dir, run_id = new_run_dir(config)
            lock = stack.enter_context(RunLock(run_dir, _say))
        else:
            run_dir = existing_run_dir(config, resume)
            lock = stack.enter_context(RunLock(run_dir, _say))
            for note in mend_status(run_dir):
                _say(note)
            if (finished := _finished(run_dir, config)) is not None:
                return finished
            for change in changes_since(run_dir, config):
                _say(str(change))
            run_id, goes_on, notes = resumption(run_dir, config)
            if goes_on is not None:
                goes_on = msgspec.structs.replace(goes_on, forgives=forgives)
            for note in notes:
                _say(note)
            again = (
                f", training on from step {goes_on.trained}"
                if goes_on and goes_on.trained < goes_on.step
                else ""
            )
            _say(f"going on in {run_dir} after step {goes_on.step if goes_on else 0}{again}")
        try:
            open_run(
                run_dir,
                run_id,
                resume_step=None if resume is None else (goes_on.step if goes_on else 0),
                trained=goes_on.trained if goes_on else None,
                steps=config.run.max_steps,
            )
            number = keep_config(run_dir, dump(config, loaded.provenance))
        except OSError as error:
            raise ConfigError(
                f"{run_dir} cannot be written: {error}; mend that, or choose another with --run.dir"
            ) from error
        return execute(
            config,
            run_dir,
            run_id,
            goes_on,
            config_number=number,
            plain=plain,
            lock_fd=lock.fd,
            may_exit=may_exit,
        )


def _finished(run_dir: Path, config: RunConfig) -> Outcome | None:
    """The outcome of a run that has nothing left to do; None when there is."""
    from paceline.cli.disk import disk_use
    from paceline.journal import read_journal
    from paceline.observe.run import RunFolds, summary
    from paceline.runtime.checkpoints import Checkpoints
    from paceline.transport.status import read_status

    status = read_status(run_dir)
    if status is None or status.status != "done":
        return None
    core = Checkpoints(run_dir / "checkpoints" / "core", config.checkpoint.keep_last, status.run_id)
    try:
        found = core.newest_usable()
    except WireError:
        return None  # what can be gone on from without one, resuming tells
    if found is None or found[0] < config.run.max_steps:
        return None
    step, _, notes = found
    for note in notes:
        _say(note)
    _say(
        f"nothing to do: {run_dir} is done, with {step} of {config.run.max_steps} steps; to go on, raise "
        "run.max_steps"
    )
    folds = RunFolds(live=True)
    folds.read(read_journal(run_dir))
    told = summary(folds) | {"run_dir": str(run_dir), "status": status.status, "reason": status.reason}
    return Outcome(told | {"disk": disk_use(run_dir).bytes()}, 0, None)


def execute(
    config: RunConfig,
    run_dir: Path,
    run_id: str,
    goes_on: Resumption | None = None,
    *,
    config_number: int = 0,
    plain: bool = False,
    lock_fd: int | None = None,
    may_exit: bool = False,
) -> Outcome:
    """Run in an opened run directory, which keeps `config` by that number. Errors are told and become the status."""
    from paceline.cli.assemble import Assembly
    from paceline.cli.disk import disk_use
    from paceline.cli.status import INTERRUPTED, StatusFile
    from paceline.cli.stopping import Stopped, StoppedTwice
    from paceline.observe.live import open_view
    from paceline.observe.monitor import Monitor
    from paceline.observe.run import RunFolds, summary, trained_steps
    from paceline.observe.sinks import open_sinks
    from paceline.observe.sinks.pump import SinkPump

    began = time.monotonic()
    folds = RunFolds(live=True)
    with StatusFile(
        run_dir, run_id=run_id, steps=config.run.max_steps, trained=lambda: trained_steps(folds)
    ) as status:
        earlier = _earlier_lives(run_dir, folds)
        pump = SinkPump(
            open_sinks(
                run_dir,
                config.metrics,
                run_name=run_dir.name,
                config=config.model_dump(mode="json"),
                say=_say,
            )
        )
        assembly = Assembly(
            config,
            run_dir,
            run_id,
            goes_on,
            status=status,
            earlier=earlier,
            config_number=config_number,
            lock_fd=lock_fd,
            may_exit=may_exit,
        )
        view = open_view(
            folds,
            sys.stderr,
            max_steps=config.run.max_steps,
            cap=lambda: assembly.cap,
            disk=assembly.disk.line,
            plain=plain,
        )
        error: BaseException | None = None
        try:
            with Monitor(folds, pump=pump, view=view, more=assembly.disk.values) as monitor:
                watching: list[Fold] = [monitor, *_awaiting_trainer(config, run_dir)]
                finish = assembly.run(watching, _say, view.phase)
            code = status.finish(finish.status, finish.reason)
        except Stopped as stopped:
            code = status.finish("stopped", str(stopped))
        except StoppedTwice as stopped:
            error, code = stopped, status.finish("stopped", str(stopped), code=INTERRUPTED)
        except (PacelineError, OSError) as failure:
            error, code = failure, status.fail(failure)
        finally:
            assembly.stopping.close()
        _write_report(run_dir, within_s=assembly.stopping.report_s())
    if error is not None:
        _say(f"error: {status.status.reason}")
        for note in getattr(error, "__notes__", ()):
            _say(f"  {note}")
        if os.strerror(errno.ENOSPC) in status.status.reason:
            _say(f"  free some space at {run_dir}, then `{_resumes(run_dir)}`")
        if lock_fd is not None and not os.fstat(lock_fd).st_nlink:
            _say(f"  {run_dir} was removed while the run went on, and what it held is gone")
    told = summary(folds, wall_s=time.monotonic() - began)
    told |= {"run_dir": str(run_dir), "status": status.status.status, "reason": status.status.reason}
    try:
        use = disk_use(run_dir)
    except OSError as gone:  # how the run ended is told all the same when its disk is gone
        _say(f"disk: cannot be looked at: {gone}")
    else:
        _say(f"disk: {use}")
        told["disk"] = use.bytes()
    more = f"; `{_resumes(run_dir)}` goes on" if status.status.status == "stopped" else ""
    _say(f"{status.status.status}: {run_dir}{more}")
    return Outcome(told, code, error)


def _resumes(run_dir: Path) -> str:
    """The command that goes on with a run."""
    return f"paceline run --resume {shlex.quote(str(run_dir))}"


def _awaiting_trainer(config: RunConfig, run_dir: Path) -> Iterator[TrainerAwaited]:
    """Where somebody else has to start the trainer, that it is missing is told."""
    from paceline.observe.waiting import TrainerAwaited

    if config.trainer.type == "external":
        yield TrainerAwaited(
            lambda: _say(
                f"waiting for a trainer on {run_dir}: a batch is there and no step was acknowledged yet; start your "
                f"trainer, or `paceline trainer CONFIG --run {run_dir}`"
            )
        )


def _earlier_lives(run_dir: Path, folds: RunFolds) -> Earlier:
    """Let the folds know what a resumed run has behind it."""
    from paceline.cli.assemble import Earlier
    from paceline.domain.events import StepTrained
    from paceline.journal import read_journal
    from paceline.journal.files import file_numbers

    at, acknowledged = 0.0, 0
    if file_numbers(run_dir, "log"):
        for record in read_journal(run_dir, on_note=lambda _: None):
            at = folds.apply(record.at, record.event, record.commands)
            if isinstance(record.event, StepTrained):
                acknowledged = record.event.step
    return Earlier(at, acknowledged)


def _write_report(run_dir: Path, within_s: float | None) -> None:
    """The report is a fold over the journal: if it cannot be made, the run stands all the same."""
    from paceline.cli.report import make_report
    from paceline.journal.files import file_numbers
    from paceline.runtime.alarm import StillRunning, ends_within

    if not file_numbers(run_dir, "log"):
        return  # it ended before anything happened
    again = f"make it with: paceline report {run_dir}"
    try:
        with nullcontext() if within_s is None else ends_within(within_s, lambda _: ""):
            _say(f"report: {make_report(run_dir)}")
    except StillRunning:
        _say(f"no report: of so long a run it takes longer than stopping may; {again}")
    except (PacelineError, OSError) as error:
        _say(f"no report: {error}; {again}")
    except KeyboardInterrupt:
        _say(f"no report; {again}")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
