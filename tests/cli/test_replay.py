"""`paceline replay` decides a journal's events again: the same commands, or the first that differs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from paceline.cli.replay import RecordedRun, as_json, told
from paceline.core.admission import FixedCap
from paceline.core.replay import Report, replay
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.journal import FileJournal
from paceline.journal.lines import line_of
from paceline.testing import ScriptedEnv, World, chaos, run_driver, setup_for, train_env
from paceline.testing.storm import Storm

Entry = tuple[float, Event, Iterable[Command]]
ASSET = Path(__file__).parents[1] / "assets" / "recorded_storm"
ASSET_SEED, ASSET_EVENTS = 5, 300


def write(run_dir: Path, entries: Iterable[Entry]) -> None:
    async def all_of_it() -> None:
        journal = FileJournal(run_dir, "run")
        for at, event, commands in entries:
            journal.append(at, event, tuple(commands))
        await journal.close()

    asyncio.run(all_of_it())


def replayed(run_dir: Path, setup: CoreSetup, cap: int = 6) -> Report:
    return replay(RecordedRun(run_dir), lambda _: Core(setup, FixedCap(cap)), line_of)


SETUP = setup_for(train_env("a", tasks=9, group_size=3, max_attempts=2), batch=6, max_steps=4)


def test_what_a_scripted_world_recorded_is_decided_the_same(tmp_path: Path) -> None:
    trace = World(SETUP, chaos(2, failures=0.4), cap=6).run()
    write(tmp_path, trace.journal)
    report = replayed(tmp_path, SETUP)
    assert report == Report(len(trace.journal), 1, (), None)
    assert told(report) == f"{len(trace.journal)} records of 1 life, no divergence"


def test_what_the_runtime_recorded_is_decided_the_same(tmp_path: Path) -> None:
    run = run_driver(SETUP, {"a": ScriptedEnv()}, cap=6, poll_s=1.0)
    write(tmp_path, run.journal.entries)
    report = replayed(tmp_path, SETUP)
    assert report.divergence is None
    assert report.records == len(run.journal.entries) > 100


@pytest.mark.parametrize("kind", [do.StartRollout, do.ShipBatch, do.NoteRetry])
def test_a_tampered_command_is_named_with_its_record(tmp_path: Path, kind: type) -> None:
    entries = list(World(SETUP, chaos(2, failures=0.6), cap=6).run().journal)
    seq = next(n for n, (_, _, commands) in enumerate(entries) if any(isinstance(c, kind) for c in commands))
    at, event, commands = entries[seq]
    number = next(n for n, c in enumerate(commands) if isinstance(c, kind))
    true = commands[number]
    forged = msgspec.structs.replace(true, reason="because")
    entries[seq] = (at, event, [*commands[:number], forged, *commands[number + 1 :]])
    write(tmp_path, entries)
    found = replayed(tmp_path, SETUP).divergence
    assert found is not None
    assert (found.seq, found.number, found.at) == (seq, number, at)
    assert type(found.event) is type(event)
    assert line_of(found.expected) == line_of(forged)
    assert line_of(found.found) == line_of(true)
    text = told(replayed(tmp_path, SETUP))
    assert text.startswith(f"record {seq}, at ")
    assert "because" in text


def test_a_tampered_event_and_another_config_diverge(tmp_path: Path) -> None:
    entries = list(World(SETUP, chaos(2, failures=0.4), cap=6).run().journal)
    write(tmp_path / "whole", entries)
    assert replayed(tmp_path / "whole", SETUP, cap=5).divergence is not None
    seq = next(n for n, (_, event, _) in enumerate(entries) if isinstance(event, on.RolloutEnded))
    del entries[seq]
    write(tmp_path / "short", entries)
    found = replayed(tmp_path / "short", SETUP).divergence
    assert found is not None
    assert found.seq >= seq
    assert as_json(replayed(tmp_path / "short", SETUP))["divergence"]["record"] == found.seq


def test_an_event_that_the_core_refuses_diverges_unless_the_run_ended_with_it(tmp_path: Path) -> None:
    entries = list(World(SETUP, chaos(2), cap=6).run().journal)[:40]
    at = entries[-1][0]
    write(tmp_path / "ended", [*entries, (at, on.PolicyPublished(9, "w"), ()), (at, on.RunFailed("no"), ())])
    report = replayed(tmp_path / "ended", SETUP)
    assert (report.divergence, report.records) == (None, 41)
    write(tmp_path / "goes-on", [*entries, (at, on.PolicyPublished(9, "w"), ()), (at, on.TimerFired(), ())])
    found = replayed(tmp_path / "goes-on", SETUP).divergence
    assert found is not None
    assert found.seq == 40
    assert "v9" in str(found.error)


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_every_life_of_a_killed_run_is_decided_the_same(tmp_path: Path, seed: int) -> None:
    storm = Storm(seed, 300)
    storm.run()
    write(tmp_path, storm.records)
    lives = sum(isinstance(record.event, on.RunOpened) for record in storm.records)
    report = replay(
        RecordedRun(tmp_path), lambda _: Core(storm.setup, storm._admission(), storm._scheduling()), line_of
    )
    assert report == Report(len(storm.records), lives, (), None)


def test_a_life_whose_beginning_is_not_known_is_said_to_be_left_out(tmp_path: Path) -> None:
    entries = list(World(SETUP, chaos(2), cap=6).run().journal)
    second = [(1e3, on.RunOpened("run", 0, resumed_from=2, recovered=True), ()), (1e3, on.TimerFired(), ())]
    write(tmp_path, [*entries, *second])
    report = replayed(tmp_path, SETUP)
    assert report.records == len(entries)
    assert [s.records for s in report.skipped] == [2]
    assert "from which step its trainer went on" in told(report)


def test_a_journal_recorded_earlier_is_still_decided_the_same() -> None:
    """Recorded by `python tests/cli/test_replay.py`. When decisions change on purpose, it is recorded again."""
    storm = Storm(ASSET_SEED, ASSET_EVENTS)
    report = replay(
        RecordedRun(ASSET), lambda _: Core(storm.setup, storm._admission(), storm._scheduling()), line_of
    )
    assert report.divergence is None, told(report)
    assert (report.records, report.lives, report.skipped) == (573, 3, ())


if __name__ == "__main__":
    storm = Storm(ASSET_SEED, ASSET_EVENTS)
    storm.run()
    write(ASSET, storm.records)
    print(len(storm.records), sum(isinstance(record.event, on.RunOpened) for record in storm.records))
