"""One world, two shells: the event heap and the asyncio runtime on virtual time take the same decisions at the same times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sim_kit import SEQ_LEN, SMALL, Kept, simulation, small_setup

from paceline.config import Limits, SamplingSection
from paceline.core.admission import AdaptiveCap, Admission, Bounds, FixedCap, PredictiveCap
from paceline.core.processing import GroupRules
from paceline.core.scheduling import (
    Divided,
    KvArea,
    Overlap,
    Overprovision,
    Partial,
    Scheduling,
    Synchronous,
    TailRounds,
    UnbiasedTail,
)
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.sim.engine import EngineModel, Link, Speculation, Speed, SplitEngine
from paceline.sim.faults import Faults
from paceline.sim.plan import RolloutPlan, Start
from paceline.sim.scoring import Scored, ScoringModel
from paceline.sim.workloads import PRESETS, Workload, workload_of
from paceline.sim.world import FaultModel, WeightsModel
from paceline.testing.modelled import Book, ModelledEngine, ModelledEnv
from paceline.testing.run import run_driver
from paceline.testing.trainer import ScriptedTrainer

TIGHT = Speed(kv_tokens=42_000, max_model_len=40_000)


def split(speed: Speed) -> SplitEngine:
    return SplitEngine(speed, [SMALL], Link(token_s=4e-6, setup_s=1e-3))


def decisions(entries: list[tuple[float, Any, Any]]) -> list[tuple[float, str]]:
    """Time and name of every command; those of one moment in an order of their own, since the two loops may take what
    happens at one moment in different turns. Checkpoints hold a whole state, and words on caps a hit rate that a reading
    at the moment of an ending rounds otherwise: both are left out."""
    found = []
    for at, _, commands in entries:
        for command in commands:
            if isinstance(command, do.SaveCheckpoint | do.NoteCap):
                continue
            if isinstance(command, do.ProcessGroup):
                # Members that a cancel stops at one moment arrive in an order of their loop's.
                name = f"ProcessGroup {command.group.id} {sorted(str(r.id) for r in command.group.rollouts)}"
            elif isinstance(command, do.ShipBatch):
                batch = command.batch
                name = f"ShipBatch {batch.step} {list(map(str, batch.rollouts))} {batch.tokens}"
                name += str([(s.versions, s.advantage) for s in batch.samples])
            else:
                name = repr(command)
            found.append((round(at, 6), name))
    return sorted(found)


CASES: dict[str, tuple[str, Callable[[], Admission], Callable[[], Scheduling], dict[str, Any]]] = {
    "overlap": ("code-single", lambda: FixedCap(8), Overlap, {}),
    "agents": ("swe-small", lambda: FixedCap(6), Overlap, {"max_steps": 2}),
    "synchronous": ("code-single", lambda: FixedCap(8), Synchronous, {"lag": 0, "max_staleness": 0}),
    "late-kept": ("code-single", lambda: FixedCap(12), lambda: Overprovision(1.5, "keep"), {"lag": 0}),
    "late-discarded": (
        "code-single",
        lambda: FixedCap(12),
        lambda: Overprovision(1.5, "discard"),
        {"lag": 0, "max_staleness": 0},
    ),
    # What is let go on is granted while another rollout asks, which is at its engine before those that must be woken.
    "partial": ("code-single", lambda: FixedCap(12), lambda: Partial(600, 1.0), {"lag": 0}),
    "partial-over": ("code-single", lambda: FixedCap(12), lambda: Partial(600, 2.0), {"lag": 0}),
    "april": ("code-single", lambda: FixedCap(12), lambda: Partial(None, 2.0), {"lag": 0}),
    "tail-rounds": (
        "code-single",
        lambda: FixedCap(12),
        lambda: TailRounds(1.25, 1.25),
        {"lag": 0, "max_staleness": 0},
    ),
    "unbiased-pinned": (
        "code-single",
        lambda: FixedCap(12),
        lambda: UnbiasedTail(800, "pinned"),
        {"lag": 0, "max_staleness": 0},
    ),
    "unbiased-resume": (
        "code-single",
        lambda: FixedCap(12),
        lambda: UnbiasedTail(800, "resume"),
        {"lag": 0, "max_staleness": 32},
    ),
    "divided": ("code-single", lambda: FixedCap(12), lambda: Divided(400, 0.25), {"lag": 0}),
    "divided-agents": (
        "swe-small",
        lambda: FixedCap(10),
        lambda: Divided(400, 0.25),
        {"lag": 0, "speed": TIGHT, "max_steps": 2},
    ),
    "kv-area": ("code-single", lambda: FixedCap(12), lambda: KvArea(300, 0.25, 0.9, 0.75), {"lag": 0}),
    "segments": ("code-single", lambda: FixedCap(8), Overlap, {"segment_tokens": 300, "lag": 2}),
    "recompute": ("code-single", lambda: FixedCap(8), Overlap, {"mode": "recompute", "lag": 2}),
    "drain": ("code-single", lambda: FixedCap(8), Overlap, {"mode": "drain", "lag": 2}),
    "full-cache": ("swe-small", lambda: FixedCap(10), Overlap, {"speed": TIGHT, "max_steps": 2}),
    "split": ("swe-small", lambda: FixedCap(10), Overlap, {"speed": TIGHT, "max_steps": 2, "make": split}),
    "split-drain": ("code-single", lambda: FixedCap(8), Overlap, {"mode": "drain", "lag": 2, "make": split}),
    "anew": (
        "swe-small",
        lambda: FixedCap(6),
        Overlap,
        {"anew": True, "max_steps": 2, "segment_tokens": 100},
    ),
    "anew-split": ("swe-small", lambda: FixedCap(10), Overlap, {"anew": True, "speed": TIGHT, "make": split}),
    "anew-recompute": (
        "swe-small",
        lambda: FixedCap(10),
        Overlap,
        {"anew": True, "mode": "recompute", "lag": 2},
    ),
    "speculating": (
        "code-single",
        lambda: FixedCap(8),
        Overlap,
        {"speed": msgspec.structs.replace(SMALL, speculation=Speculation(references="none")), "lag": 2},
    ),
    "failing attempts": (
        "swe-small",
        lambda: FixedCap(8),
        Overlap,
        {"max_steps": 2, "faults": FaultModel(infrastructure=0.15, environment=0.1)},
    ),
    "failing requests": (
        "code-single",
        lambda: FixedCap(12),
        lambda: Divided(400, 0.25),
        {"lag": 0, "faults": FaultModel(call=0.05)},
    ),
    "failing loads": (
        "code-single",
        lambda: FixedCap(8),
        Overlap,
        {"lag": 2, "faults": FaultModel(load=0.5)},
    ),
    "all of them, late": (
        "code-single",
        lambda: FixedCap(12),
        lambda: UnbiasedTail(800, "pinned"),
        {
            "lag": 0,
            "max_staleness": 0,
            "faults": FaultModel(infrastructure=0.1, environment=0.05, call=0.05, load=0.3),
        },
    ),
    "a line before the scorers": (
        "code-single",
        lambda: FixedCap(12),
        lambda: Overprovision(1.5, "discard"),
        {"lag": 0, "max_staleness": 0, "scoring": ScoringModel(at_once=3, median_s=4.0, sigma=0.7)},
    ),
    # One engine: readings of two come at the same moment, in an order of the loop's, and the first gets what starts.
    "adaptive": (
        "swe-small",
        lambda: AdaptiveCap(Bounds(most=24)),
        Overlap,
        {"poll_s": 4.7, "speed": TIGHT, "max_steps": 2, "engines": 1},
    ),
    "predictive": (
        "swe-small",
        PredictiveCap,
        Overlap,
        {"poll_s": 4.7, "speed": TIGHT, "max_steps": 2, "engines": 1},
    ),
}


class Anew:
    """Agents that compact their history at the third turn, ask another one at the fourth, and go back to the second."""

    longest = 40_000

    def __init__(self, of: Workload) -> None:
        self._of = of

    def plan(self, command: do.StartRollout, now: float) -> RolloutPlan:
        plan = self._of.plan(command, now)
        prompt, first = plan.prompt + plan.scaffold, 60 + command.noise_seed % 97
        wait = 1.0 + command.noise_seed % 1009 / 1009
        turns = [(wait, 0, first), *[(wait, 200, 150)] * 5]
        second = prompt + first + 200 + 150
        starts = [
            None,
            None,
            Start(kept=prompt, found=prompt),
            Start(conversation=1),
            Start(kept=second, after=1, found=prompt),
            Start(kept=200, found=200, conversation=1),
        ]
        return msgspec.structs.replace(plan, turns=tuple(turns), starts=tuple(starts))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_heap_and_runtime_give_the_same_commands_at_the_same_times(case: str, seed: int) -> None:
    preset, admission, scheduling, changes = CASES[case]
    changes = dict(changes)
    speed, poll_s = changes.pop("speed", SMALL), changes.pop("poll_s", None)
    engines, make = changes.pop("engines", 2), changes.pop("make", EngineModel)
    weights = WeightsModel(load_s=2.0, mode=changes.pop("mode", "keep"))
    anew, faults = changes.pop("anew", False), changes.pop("faults", None)
    scoring = changes.pop("scoring", ScoringModel())
    of = small_setup(seed=seed, **changes)
    workload: Workload = workload_of(PRESETS[preset], seed)
    if anew:
        workload = Anew(workload)
    if scoring.median_s is not None:
        workload = Scored(workload, scoring, seed)
    kept = Kept()
    simulation(
        of=of,
        admission=admission(),
        scheduling=scheduling(),
        engines=engines,
        speed=speed,
        make=make,
        workload=workload,
        weights=weights,
        poll_s=poll_s,
        scored_at_once=scoring.at_once,
        faults=faults,
        folds=[kept],
    ).run()
    book = Book(
        {"env": workload}, Faults(faults, of.seed), {"env": scoring.at_once} if scoring.at_once else {}
    )
    run = run_driver(
        of,
        {"env": ModelledEnv(book)},
        engines=lambda: [
            ModelledEngine(f"e{n}", speed, book, weights, model=make(speed)) for n in range(engines)
        ],
        trainer=lambda: ScriptedTrainer(train_s=lambda _step: 20.0),
        admission=admission(),
        scheduling=scheduling(),
        limits=Limits(deadline_s=1e9),
        sampling=SamplingSection(max_tokens=SEQ_LEN - 1),
        rules=lambda env: GroupRules(env=env, seq_len=SEQ_LEN),
        poll_s=poll_s or 0.0,
        max_seconds=1e7,
    )
    failed = [
        event
        for _, event, _ in kept.entries
        if (isinstance(event, on.RolloutEnded) and event.rollout.outcome.ending == "failed")
        or (isinstance(event, on.WeightsLoaded) and event.error)
    ]
    assert bool(failed) == (faults is not None)
    simulated, real = decisions(kept.entries), decisions(run.journal.entries)
    # The last batch stops what runs, at one moment again: a call that ends then may ask before or after.
    end = max(at for at, name in simulated if name.startswith("ShipBatch"))
    simulated, real = ([each for each in found if each[0] < end] for found in (simulated, real))
    assert len(simulated) > 100
    assert simulated == real
