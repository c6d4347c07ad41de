"""What holds of the core, and of what is measured of it, under every policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from paceline.sim.cells import build
from paceline.sim.measure import Measure
from paceline.sim.simulation import Simulation
from paceline.sim.study import StudyConfig

ANSWERS = {"reasoning": {"median": 300, "sigma": 0.9, "cap": 3000}, "group_size": 4}
AGENTS = {"agents": {"turns": 6}, "group_size": 4}
FIXED = {"type": "fixed", "cap": 64}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "predictive": ({"type": "overlap", "lag": 2}, {"type": "predictive"}, [AGENTS]),
    "adaptive": ({"type": "overlap", "lag": 2}, {"type": "adaptive"}, [AGENTS, ANSWERS]),
    "kv_area": ({"type": "kv_area"}, FIXED, [ANSWERS]),
    "divided": ({"type": "divided"}, FIXED, [ANSWERS]),
    "resume": ({"type": "unbiased_tail", "late": "resume", "cutoff_tokens": 500}, FIXED, [ANSWERS]),
    "pinned": ({"type": "unbiased_tail", "late": "pinned", "cutoff_tokens": 500}, FIXED, [ANSWERS]),
    "tail_rounds": ({"type": "tail_rounds"}, FIXED, [ANSWERS]),
    "partial": ({"type": "partial", "budget_tokens": 300}, FIXED, [ANSWERS]),
    "overprovision": ({"type": "overprovision", "factor": 1.5}, FIXED, [ANSWERS]),
}


def simulation_of(case: str, *folds: Any, **more: Any) -> Simulation:
    scheduling, admission, envs = CASES[case]
    study = StudyConfig.model_validate(
        {
            "study": {"seeds": 1, "steps": 30},
            "engines": {"count": 2},
            "batch": {"rollouts": 32, "seq_len": 1 << 17},
            "workload": [{"name": "w", "env": [{**env, "max_attempts": 3} for env in envs]}],
            "policy": [
                {"name": "p", "scheduling": scheduling, "admission": admission, "algorithm": {"name": "rloo"}}
            ],
        }
        | more
    )
    return build(study, study.policy[0], study.workload[0], 1, folds=folds)


@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_stays_what_it_was(case: str) -> None:
    """A checkpoint is written in a thread while the run goes on."""
    simulation = simulation_of(case)
    simulation.run(events=3000)
    snapshot = simulation.core.snapshot()
    then = msgspec.msgpack.encode(snapshot)
    simulation.run(events=3600)
    assert simulation.events >= 3600
    assert msgspec.msgpack.encode(snapshot) == then
    assert msgspec.msgpack.encode(simulation.core.snapshot()) != then


FAULTS = {
    "infrastructure": 0.15,
    "environment": 0.05,
    "call": 0.03,
    "load": 0.1,
    "engine_lost_at_s": [30.0],
    "engine_back_s": 30,
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_measured_as_lost_is_what_the_account_has_lost(case: str) -> None:
    measure = Measure()
    simulation = simulation_of(case, measure, faults=FAULTS)
    simulation.run(steps=12)
    lost: Counter[str] = Counter()
    rollouts: Counter[str] = Counter()
    for split, _, _, _, places, tokens in simulation.core.account.snapshot():
        if split == "train":
            lost.update(tokens)
            rollouts.update(places)
    for place in ("in_flight", "grouped", "queued", "shipped"):
        del lost[place]
    assert +Counter(measure.lost_tokens) == +lost
    if AGENTS in CASES[case][2]:  # an answer of one request has sampled nothing when it fails
        assert lost["failed"] > 0
    # Nothing is kept of what has ended.
    assert len(measure._groups) == len(simulation.core.groups) + len(simulation.core.processing)
    assert len(measure._lengths) == rollouts["grouped"] + rollouts["queued"]
