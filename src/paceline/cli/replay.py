"""`paceline replay RUN`: the journal's events decided again, and compared with what was decided; with `--batches`, its batches
made again. See `docs/recovery.md`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.rebuild import Extras
from paceline.core.replay import Divergence, NotCovered, Report, replay
from paceline.domain.commands import Command
from paceline.domain.events import Event, RunOpened
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError, WireError, printable
from paceline.journal import Record, read_extras, read_journal, read_rollouts
from paceline.journal.lines import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.config import RunConfig
    from paceline.core.scheduler import Core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--batches",
        action="store_true",
        help="make every batch again from the recorded rollouts instead, and compare the bytes",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")


def run(args: argparse.Namespace) -> int:
    if args.batches:
        return _make_batches(args)
    from paceline.cli.rundir import config_file

    makers: dict[Path, Callable[[], Core]] = {}

    def make(opened: RunOpened) -> Core:
        path = config_file(args.run, opened.config)
        if opened.config and not path.is_file():
            raise NotCovered(f"its config, {path}, is gone")
        if path not in makers:
            makers[path] = asyncio.run(core_maker(config_at(path)))
        return makers[path]()

    sizes = {env.label: env.group_size for env in config_at(config_file(args.run, 0)).env}
    report = replay(RecordedRun(args.run), make, line_of, sizes)
    print(json.dumps(as_json(report)) if args.json else told(report))
    if not report.records:
        raise ConfigError(f"{args.run}: no record could be decided again")
    return 1 if report.divergence is not None else 0


def _make_batches(args: argparse.Namespace) -> int:
    from paceline.cli import remade

    found = remade.remade(args.run)
    print(json.dumps(remade.as_json(found)) if args.json else printable(remade.told(found)))
    if not found.same and found.differs is None:
        raise ConfigError(f"{args.run}: no batch could be made again")
    return 1 if found.differs is not None else 0


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


def config_at(path: Path) -> RunConfig:
    """A config that the run directory keeps. ConfigError when it is gone."""
    from paceline.config import RunConfig
    from paceline.config.load import load

    if not path.is_file():
        raise ConfigError(f"{path} is not there: replay builds the core from it")
    # `module:Class` in a config means a module that lies where the command is given.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return load(RunConfig, [path], []).value


async def core_maker(config: RunConfig) -> Callable[[], Core]:
    """Makes cores as the run made them. Environments are made once, to be asked what the core decides by: the number of
    their tasks, whether they score groups whole. ConfigError for one that cannot be had."""
    from paceline.cli.environments import environment_of, own_gates, own_samplers
    from paceline.config import EnvSection, EvalSection
    from paceline.core.admission.choice import admission_of
    from paceline.core.scheduler import Core
    from paceline.core.scheduling import scheduling_of
    from paceline.core.setup import core_setup
    from paceline.domain.task import Split
    from paceline.envs.registry import tasks_of

    sizes: dict[tuple[str, str], int | None] = {}
    fingerprints: dict[str, str] = {}
    scores_groups: dict[str, bool] = {}
    whole: list[tuple[str, str]] = []
    sections: list[tuple[Split, EnvSection | EvalSection]] = [("train", s) for s in config.env]
    sections += [("eval", s) for s in config.eval]
    with TemporaryDirectory() as logs:
        for split, section in sections:
            environment = await environment_of(section, split, logs=Path(logs))
            try:
                source = tasks_of(environment, split, section.label)
                sizes[split, section.label] = source.size
                if environment.whole_group:
                    whole.append((split, section.label))
                if split == "train":
                    fingerprints[section.label] = source.fingerprint
                    scores_groups[section.label] = environment.all_or_nothing
            finally:
                await environment.close()
    samplers = own_samplers(config)

    def make() -> Core:
        setup = core_setup(
            config, sizes, fingerprints, whole_groups=whole, samplers=samplers, gates=own_gates(config)
        )
        return Core(setup, admission_of(config, scores_groups), scheduling_of(config))

    return make


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
