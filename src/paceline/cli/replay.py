"""`paceline replay RUN`: the journal's events decided again, and compared with what was decided; with `--batches`, its batches
made again. See `docs/recovery.md`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cli.cores import config_at, core_maker, facts_of
from paceline.cli.rundir import config_file
from paceline.core.rebuild import Extras
from paceline.core.replay import Divergence, NotCovered, Report, replay
from paceline.domain.commands import Command
from paceline.domain.events import Event, RunOpened
from paceline.domain.ids import EnvName, RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError, WireError, printable
from paceline.journal import Record, read_extras, read_journal, read_rollouts
from paceline.journal.lines import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.scheduler import Core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, or a file that --keep made")
    parser.add_argument(
        "--batches",
        action="store_true",
        help="make every batch again from the recorded rollouts instead, and compare the bytes",
    )
    parser.add_argument(
        "--against", metavar="OTHER", type=Path, help="with --batches: compare with those of another run"
    )
    parser.add_argument(
        "--keep",
        metavar="FILE",
        type=Path,
        help="keep the journal in one small file, to test later releases with",
    )
    parser.add_argument(
        "--keep-mb",
        metavar="MB",
        type=_megabytes,
        default=4.0,
        help="most megabytes of that file (default 4)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")


def _megabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of megabytes above 0")
    return number


def run(args: argparse.Namespace) -> int:
    if not args.run.is_dir() and not args.run.is_file():
        raise ConfigError(f"{args.run} is neither a run's directory nor a file that --keep made")
    if args.keep is not None and (args.batches or args.against is not None):
        raise ConfigError("--keep keeps decisions, and --batches makes batches again: give one of them")
    if args.run.is_file() and (args.batches or args.against is not None or args.keep is not None):
        raise ConfigError(
            f"{args.run} is a kept journal, which has no tokens and is kept already: give the run's directory"
        )
    if args.batches or args.against is not None:
        return _make_batches(args)
    if args.keep is not None:
        return _keep(args)
    report = decided_again(args.run)
    print(json.dumps(as_json(report)) if args.json else told(report))
    if not report.records:
        raise ConfigError(f"{args.run}: no record could be decided again")
    return 1 if report.divergence is not None else 0


def decided_again(path: Path) -> Report:
    """The journal of a run directory, or a kept one."""
    from paceline.cli.kept import KeptRun

    if path.is_file():
        kept = KeptRun(path)
        return replay(kept, kept.core, line_of, kept.sizes)
    return replay(RecordedRun(path), core_of(path), line_of, group_sizes(path))


def core_of(run_dir: Path) -> Callable[[RunOpened], Core]:
    """Gives the core of a life of the run, by its own config."""
    makers: dict[Path, Callable[[], Core]] = {}

    def make(opened: RunOpened) -> Core:
        path = config_file(run_dir, opened.config)
        if opened.config and not path.is_file():
            raise NotCovered(f"its config, {path}, is gone")
        if path not in makers:
            config = config_at(path)
            makers[path] = core_maker(config, asyncio.run(facts_of(config)))
        return makers[path]()

    return make


def group_sizes(run_dir: Path) -> dict[EnvName, int]:
    """For journals that do not say how large a group is."""
    return {env.label: env.group_size for env in config_at(config_file(run_dir, 0)).env}


def _keep(args: argparse.Namespace) -> int:
    from paceline.cli.kept import keep

    kept = keep(args.run, args.keep, int(args.keep_mb * 1e6), on_note=_say)
    print(
        json.dumps(as_json(kept.report)) if args.json else kept.told() if kept.is_kept else told(kept.report)
    )
    return 0 if kept.is_kept else 1


def _make_batches(args: argparse.Namespace) -> int:
    from paceline.cli import remade

    if args.against is None:
        found = remade.remade(args.run)
        text = remade.told(found)
    else:
        found = remade.against(args.run, args.against)
        text = remade.told(found, str(args.against), str(args.run))
    print(json.dumps(remade.as_json(found)) if args.json else printable(text))
    if not found.same and found.differs is None:
        raise ConfigError(f"{args.run}: no batch could be made again")
    return found.exit_code


class RecordedRun:
    """A run directory, as `replay` reads it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def records(self, since: int) -> Iterator[Record]:
        return read_journal(self._run_dir, since=since, on_note=_say if not since else _unsaid)

    def stored(
        self, wanted: frozenset[RolloutId], since: int
    ) -> tuple[Mapping[RolloutId, Rollout], Mapping[RolloutId, Extras]]:
        if not wanted:
            return {}, {}
        found = {r.id: r for r in read_rollouts(self._run_dir, wanted, since=since, on_note=_unsaid)}
        return found, read_extras(self._run_dir, since=since, on_note=_unsaid)

    def checkpoint(self, seq: int) -> dict[str, Any] | None:
        from paceline.runtime.checkpoints import Checkpoints

        kept = Checkpoints(self._run_dir / "checkpoints" / "core", 1)
        for step in kept.steps():
            try:
                state = kept.load(step)
            except WireError as error:
                _say(str(error))
                continue
            if state.get("seq") == seq:
                return state
        return None


# ── telling ──


def told(report: Report) -> str:
    """Sentences for people."""
    lives = "1 life" if report.lives == 1 else f"{report.lives} lives"
    said = [
        f"records {s.first} to {s.first + s.records - 1} were not decided again: {s.why}"
        for s in report.skipped
    ]
    if (divergence := report.divergence) is None:
        said.append(f"{report.records} records of {lives}, no divergence")
    else:
        said += _told(divergence)
    return printable("\n".join(said))


def _told(divergence: Divergence) -> list[str]:
    found = _command(divergence.found)
    if divergence.error is not None:
        found = f"the core refuses the event: {divergence.error}"
    return [
        f"record {divergence.seq}, at {divergence.at:.3f} s, is decided otherwise",
        f"  event     {_short(divergence.event)}",
        f"  command   {divergence.number + 1}",
        f"  expected  {_command(divergence.expected)}",
        f"  found     {found}",
    ]


def _command(command: Command | None) -> str:
    return "no command" if command is None else _short(command)


def _short(record: Event | Command) -> str:
    text = f"{type(record).__name__} {_encoded(record)}"
    return text if len(text) <= 600 else f"{text[:600]}… ({len(text) - 600} more characters)"


def _encoded(record: Event | Command) -> str:
    return msgspec.json.encode(line_of(record)).decode()


def as_json(report: Report) -> dict[str, Any]:
    """For scripts: events and commands as the journal has them."""
    found = report.divergence
    divergence = None
    if found is not None:
        divergence = {
            "record": found.seq,
            "at": found.at,
            "event": msgspec.to_builtins(line_of(found.event)),
            "command": found.number,
            "expected": None if found.expected is None else msgspec.to_builtins(line_of(found.expected)),
            "found": None if found.found is None else msgspec.to_builtins(line_of(found.found)),
            "error": found.error,
        }
    return {
        "records": report.records,
        "lives": report.lives,
        "skipped": [{"first": s.first, "records": s.records, "why": s.why} for s in report.skipped],
        "divergence": divergence,
    }


def _say(note: str) -> None:
    print(printable(note), file=sys.stderr, flush=True)


def _unsaid(note: str) -> None:
    """It was said when the journal was read from its beginning."""
