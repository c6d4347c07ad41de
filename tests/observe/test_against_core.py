"""The folds against the real core: what they piece together from a journal is what the core itself believes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.config import EvalSection
from paceline.core.gates import Gates, Judgement, Outcome
from paceline.core.setup import CoreSetup
from paceline.domain.commands import Command, FinishRun, NoteDiscarded, ShipBatch
from paceline.domain.events import Event
from paceline.observe.metrics import metric_of
from paceline.observe.run import RunFolds
from paceline.testing import World, chaos, setup_for, train_env
from paceline.testing.script import Plan, Script


def world_setup(seed: int) -> CoreSetup:
    rules = ("drop", "mask_tokens", "train")
    return setup_for(
        train_env("a", group_size=2 + seed % 3, max_attempts=2, on_stale=rules[seed % 3]),
        train_env("b", group_size=2, on_stale=rules[(seed + 1) % 3]),
        batch=6,
        lag=seed % 3,
        max_staleness=max(1, seed % 3),
        max_steps=6,
        evals=[EvalSection(id="held", examples=3, k=2, every=2)],
        checkpoint_every=2,
        seed=seed,
        seq_len=12 if seed % 2 else 64,
    )


def places_of(counts: dict[str, int]) -> dict[str, int]:
    """The core tells open groups from the batch list; to a reader both wait."""
    merged = dict(counts)
    merged["queued"] = merged.get("queued", 0) + merged.pop("grouped", 0)
    return {place: count for place, count in merged.items() if count}


@pytest.mark.parametrize("seed", range(24))
def test_the_account_of_the_journal_is_the_account_of_the_core(seed: int) -> None:
    folds = RunFolds()

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        folds.apply(world.now, event, commands)
        assert all(line.is_conserved for line in folds.account.lines())
        if any(isinstance(command, ShipBatch | FinishRun) for command in commands):
            compare(world)

    def compare(world: World) -> None:
        believed: dict[tuple[str, str], Any] = world.core.account.streams()
        for line in folds.account.lines():
            account = believed[line.split, line.env]
            assert (line.launched, line.sampled) == (account.launched, account.sampled)
            assert places_of(dict(line.rollouts)) == places_of(account.rollouts)
            # While a rollout is queued, the core has written off its cut tail and its masked tokens already.
            loose = ("queued", "overlong", "stale")
            mine, theirs = places_of(dict(line.tokens)), places_of(account.tokens)
            tight = {place: count for place, count in mine.items() if place not in loose}
            assert tight == {place: count for place, count in theirs.items() if place not in loose}
            assert sum(mine.get(p, 0) for p in loose) == sum(theirs.get(p, 0) for p in loose)
            if not line.rollouts["queued"]:
                assert mine == theirs

    world = World(world_setup(seed), chaos(seed, failures=0.25), engines=2, cap=6, watch=watch)
    trace = world.run(events=30_000)
    assert trace.finish is not None
    assert len(folds.training.steps) == len(trace.batches)
    assert {row.step for row in folds.training.evals} == {report.version for report in trace.evals}


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_was_killed_and_resumed_is_accounted_for_as_one(seed: int) -> None:
    folds = RunFolds()
    times = []

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        times.append(folds.apply(world.now, event, commands))
        assert all(line.is_conserved for line in folds.account.lines())

    setup = world_setup(seed)
    first = World(setup, chaos(seed, failures=0.1), engines=2, cap=6, watch=watch)
    while not first.trace.checkpoints and first.trace.finish is None:
        first.run(events=10)
    first.run(events=25)  # killed some time after it
    step, state = first.trace.checkpoints[-1]
    second = World(setup, chaos(seed + 100, failures=0.1), engines=2, cap=6, state=state, watch=watch)
    second.run(events=30_000)
    assert second.trace.finish is not None
    assert times == sorted(times)
    for line in folds.account.lines():
        assert line.rollouts["in_flight"] == line.rollouts["queued"] == 0
        assert line.launched == sum(
            c.task.env == line.env and c.task.split == line.split
            for world in (first, second)
            for c in world.trace.launched
        )
    assert {row.segment for row in folds.training.steps if row.step > step} >= {1}
    assert folds.run.status == "done"


class Parity:
    """Refuses groups of every other task."""

    def __init__(self, size: int | None, seed: int) -> None: ...

    def judge(self, outcome: Outcome) -> Judgement:
        return Judgement("an odd task" if outcome.task % 2 else "")

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def test_what_a_gate_refuses_is_a_metric_of_its_own_by_name_and_no_more_than_the_core_threw_away() -> None:
    spec = msgspec.structs.replace(
        train_env(group_size=2, tasks=12), gates=lambda: Gates({"odd": Parity(None, 0)})
    )
    folds = RunFolds()

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        folds.apply(world.now, event, commands)

    script = Script(plan=lambda rollout, _task: Plan(reward=float(rollout.member)))
    world = World(setup_for(spec, batch=4, max_steps=6), script, cap=6, watch=watch)
    trace = world.run()
    refused = sum(c.reason.startswith("gate odd: ") for c in trace.commands(NoteDiscarded))
    assert refused > 4
    rows = [row.values for row in folds.training.steps]
    counted = sum(row.get("train/all/gated", 0.0) * row["train/all/rollouts"] for row in rows)
    left = refused - round(counted)  # those of the window that the end of the run cut short
    assert 0 <= left <= 6
    assert any(0 < row.get("train/env/gated/odd", 0.0) < 1 for row in rows)
    assert all(row.get("train/env/gated/odd") == row.get("train/all/gated") for row in rows)
    assert metric_of("train/env/gated/odd") is not None
