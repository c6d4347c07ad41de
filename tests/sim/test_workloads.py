"""What workloads draw comes out in the rollouts that are simulated."""

from __future__ import annotations

from math import exp, log

import pytest
from sim_kit import Kept, simulation

from paceline.core.streams import key
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import StartRollout
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.sim.workloads import Agents, AgentTurns, Reasoning, ReasoningLengths, Tool


def start(number: int, version: int) -> StartRollout:
    task = TaskRef("env", "train", number)
    return StartRollout(RolloutId(number, 0, 0), task, 0, key(number, "noise"), "e0", version)


def test_answers_drift_by_a_factor_at_each_version_and_are_the_same_answers() -> None:
    # Long enough for rounding not to matter, and far below the cap.
    steady = Reasoning(ReasoningLengths(median=50_000, sigma=0.5, cap=10_000_000), seed=3)
    drifting = Reasoning(ReasoningLengths(median=50_000, sigma=0.5, cap=10_000_000, drift=0.005), seed=3)

    def tokens(workload: Reasoning, number: int, version: int) -> int:
        return workload.plan(start(number, version), 0.0).turns[0][2]

    for number in range(50):
        base = tokens(steady, number, 0)
        assert tokens(steady, number, 100) == tokens(drifting, number, 0) == base
        for version in (1, 40, 100):
            grown = log(tokens(drifting, number, version) / base)
            assert grown == pytest.approx(0.005 * version, abs=3e-4)


def test_answers_that_drift_beyond_the_cap_are_cut_there() -> None:
    shape = ReasoningLengths(median=1000, sigma=0.0, cap=2000, drift=0.5)
    plans = [Reasoning(shape, seed=3).plan(start(7, version), 0.0) for version in range(4)]
    assert [plan.turns[0][2] for plan in plans] == [1000, round(1000 * exp(0.5)), 2000, 2000]
    assert [plan.outcome.cause for plan in plans] == [None, None, "tokens", "tokens"]


@pytest.mark.parametrize("wait_s", [0.0, 4.0])
def test_the_first_turn_comes_when_the_sandbox_is_up_and_not_before(wait_s: float) -> None:
    shape = AgentTurns(
        turns=3, start_s=20.0, start_sigma=0.8, tools=(Tool(share=1, median_s=wait_s),), cap=20_000
    )
    workload = Agents(shape, seed=5)
    kept = Kept()
    simulation(seed=5, workload=workload, folds=[kept], max_steps=1).run()
    started: dict[RolloutId, tuple[float, StartRollout]] = {}
    asked: dict[RolloutId, float] = {}
    for at, event, commands in kept.entries:
        if isinstance(event, on.TurnRequested):
            asked.setdefault(event.rollout, at)
        started |= {c.rollout: (at, c) for c in commands if isinstance(c, do.StartRollout)}
    drawn = {rollout: workload.plan(command, at).start_s for rollout, (at, command) in started.items()}
    assert len(asked) >= 16
    assert len(set(drawn.values())) > 10
    assert min(drawn.values()) < 20.0 < max(drawn.values())
    for rollout, at in asked.items():
        assert at - started[rollout][0] == pytest.approx(drawn[rollout])
