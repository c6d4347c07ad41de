"""Every policy over random worlds: `Invariants` looks after every decision, conservation included."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from policies import POLICIES, setup_of

from paceline.config import EvalSection
from paceline.domain.commands import Command, FinishRun, ShipBatch
from paceline.domain.events import Event
from paceline.journal.lines import line_of
from paceline.observe.run import RunFolds
from paceline.testing import Invariants, World, chaos, train_env


def world_of(name: str, seed: int, *, state: dict[str, Any] | None = None, **more: Any) -> World:
    kind = POLICIES[name]
    finite = seed % 3 == 0
    setup = setup_of(
        kind,
        envs=(
            train_env("a", group_size=2 + seed % 3, max_attempts=2, tasks=9 if finite else None, epochs=2 if finite else None),
            train_env("b", group_size=3, tasks=7 if finite else None, epochs=2 if finite else None,
                      tasks_per_minute=120.0 if seed % 5 == 0 else None),
        ),
        batch=6 + seed % 3,
        batch_tokens=60 if seed % 7 == 3 else None,
        max_steps=6,
        evals=[EvalSection(id="held", examples=3, k=2, every=2)],
        checkpoint_every=2,
        seed=seed,
        seq_len=512,
    )  # fmt: skip
    return World(setup, chaos(seed), engines=2, cap=6, scheduling=kind.make(), state=state, **more)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_ends_its_run_and_loses_nothing(name: str, seed: int) -> None:
    folds, invariants = RunFolds(), Invariants()

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        invariants(world, event, commands)
        folds.apply(world.now, event, commands)
        if any(isinstance(command, ShipBatch | FinishRun) for command in commands):
            assert all(line.is_conserved for line in folds.account.lines())
            believed = world.core.account.streams()
            for line in folds.account.lines():
                account = believed[line.split, line.env]
                mine = {p: n for p, n in line.rollouts.items() if n and p != "queued"}
                theirs = {p: n for p, n in account.rollouts.items() if n and p not in ("queued", "grouped")}
                assert mine == theirs

    trace = world_of(name, seed, watch=watch).run(events=60_000)
    assert trace.finish is not None, "it stands still"
    assert trace.finish.status == "done"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", POLICIES)
def test_a_seed_repeats_its_run(name: str, seed: int) -> None:
    first, second = (world_of(name, seed).run(events=60_000) for _ in range(2))
    lines = [
        [(at, line_of(event), [line_of(c) for c in cs]) for at, event, cs in trace.journal]
        for trace in (first, second)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_a_run_goes_on_from_any_of_its_checkpoints(name: str, seed: int) -> None:
    first = world_of(name, seed).run(events=60_000)
    for step, state in first.checkpoints[:-1]:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False) == state
        trace = world_of(name, seed, state=state, watch=Invariants()).run(events=60_000)
        assert trace.finish is not None
        assert trace.finish.status == "done"
        steps = [batch.step for batch in trace.batches]
        assert steps == list(range(step + 1, step + 1 + len(steps)))
