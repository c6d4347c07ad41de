"""The folds against the real core: what they piece together from a journal is what the core itself believes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EvalSection
from paceline.core.setup import CoreSetup
from paceline.domain.commands import Command, FinishRun, ShipBatch
from paceline.domain.events import Event
from paceline.observe.run import RunFolds
from paceline.testing import World, chaos, setup_for, train_env


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
