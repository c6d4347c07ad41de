"""Whole simulations: they repeat, and every decision keeps the conservation laws, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from sim_kit import SMALL, Kept, as_bytes, simulation

from paceline.core.admission import AdaptiveCap, Admission, Bounds, FixedCap, PredictiveCap
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
from paceline.core.streams import key, uniform
from paceline.domain import events as on
from paceline.errors import EngineError
from paceline.sim.engine import EngineModel, Link, Speculation, Speed, SplitEngine
from paceline.sim.engine.split import Recompute
from paceline.sim.scoring import Scored, ScoringModel
from paceline.sim.workloads import PRESETS, workload_of
from paceline.sim.world import FaultModel, WeightsModel
from paceline.testing.simulated import Checked


@pytest.mark.parametrize("preset", ["code-single", "swe-small"])
def test_a_seed_repeats_its_journal_byte_for_byte(preset: str) -> None:
    written = []
    for seed in (3, 3, 4):
        kept = Kept()
        simulation(preset, seed=seed, max_steps=2, folds=[kept]).run()
        written.append(as_bytes(kept.entries))
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_a_run_ends_as_a_real_one_does_with_every_step_trained() -> None:
    kept = Kept()
    sim = simulation(folds=[kept], watch=Checked())
    sim.run()
    assert sim.finish is not None
    assert sim.finish.status == "done"
    assert [e.step for _, e, _ in kept.entries if isinstance(e, on.StepTrained)] == [1, 2, 3, 4]


def test_a_load_that_failed_may_succeed_when_it_is_tried_again_at_once() -> None:
    kept = Kept()
    simulation(
        weights=WeightsModel(load_s=0.0), faults=FaultModel(load=0.3), max_steps=12, folds=[kept], seed=1
    ).run()
    loads = [e for _, e, _ in kept.entries if isinstance(e, on.WeightsLoaded)]
    failed = sum(load.error is not None for load in loads)
    assert 0 < failed < 0.6 * len(loads)


def test_policies_meet_the_same_rollouts() -> None:
    lengths = []
    for cap in (3, 8):
        kept = Kept()
        simulation(admission=FixedCap(cap), folds=[kept]).run()
        ended = [e.rollout for _, e, _ in kept.entries if isinstance(e, on.RolloutEnded)]
        lengths.append({r.id: r.sampled_tokens for r in ended if r.outcome.ending != "cancelled"})
    both = lengths[0].keys() & lengths[1].keys()
    assert len(both) > 40
    assert all(lengths[0][r] == lengths[1][r] for r in both)


ON_POLICY = {"lag": 0, "max_staleness": 0}
POLICIES: list[tuple[Callable[[], Scheduling], dict[str, int]]] = [
    (Overlap, ON_POLICY),
    (Overlap, {"lag": 2}),
    (Synchronous, ON_POLICY),
    (lambda: Overprovision(1.5, "keep"), {"lag": 0}),
    (lambda: Overprovision(1.5, "discard"), ON_POLICY),
    (lambda: Partial(600, 1.0), {"lag": 0}),
    (lambda: Partial(None, 2.0), {"lag": 0}),
    (lambda: TailRounds(1.25, 1.25), ON_POLICY),
    (lambda: UnbiasedTail(800, "pinned"), ON_POLICY),
    (lambda: UnbiasedTail(800, "resume"), {"lag": 0, "max_staleness": 32}),
    (lambda: Divided(400, 0.25), {"lag": 0}),
    (lambda: KvArea(300, 0.25, 0.9, 0.75), {"lag": 0}),
]


def _admission(kind: int) -> Admission:
    if kind == 0:
        return FixedCap(9)
    return AdaptiveCap(Bounds(most=24)) if kind == 1 else PredictiveCap(Bounds(most=24))


def split(speed: Speed, recompute: Recompute) -> SplitEngine:
    return SplitEngine(speed, [SMALL], Link(token_s=4e-6, setup_s=1e-3), recompute=recompute)


def chance_run(seed: int) -> None:
    """A small world with everything drawn: policy, admission, faults, memory, weights, segments, kinds of engines, scorers."""

    def draw(what: str, n: int) -> int:
        return int(uniform(key(seed, what), 0) * n)

    make, changes = POLICIES[draw("policy", len(POLICIES))]
    lost = (40.0 + 100.0 * draw("when", 5),) if draw("lost", 3) == 0 else ()
    faults = FaultModel(
        infrastructure=0.1 * draw("infrastructure", 3),
        environment=0.05 * draw("environment", 2),
        call=0.05 * draw("call", 3),
        load=0.2 * draw("load", 2),
        engine_lost_at_s=lost,
        engine_back_s=60.0,
    )
    admission = _admission(draw("admission", 3))
    speed = Speed(kv_tokens=(30_000, 60_000)[draw("memory", 2)], max_model_len=29_000, max_num_seqs=12)
    if draw("speculation", 4) == 0:
        speed = msgspec.structs.replace(speed, speculation=Speculation(off_above=10))
    kind = draw("kind", 6)
    preset = PRESETS[("code-single", "math-tool", "search")[draw("preset", 3)]]
    scorers = (None, None, 2, 6)[draw("scorers", 4)]
    scoring = ScoringModel(at_once=scorers, median_s=3.0 if scorers else None)
    sim = simulation(
        workload=Scored(workload_of(preset, seed), scoring, seed),
        scored_at_once=scorers,
        seed=seed,
        scheduling=make(),
        admission=admission,
        speed=speed,
        make=EngineModel if kind > 1 else partial(split, recompute=("prefill", "decode")[kind]),
        weights=WeightsModel(
            load_s=2.0 * draw("slow", 2), mode=("keep", "recompute", "drain")[draw("mode", 3)]
        ),
        faults=faults,
        poll_s=5.0 if admission.learns else None,
        max_steps=2,
        batch=(8, 12)[draw("batch", 2)],
        segment_tokens=(None, 250)[draw("segments", 2)],
        park=bool(draw("park", 2)),
        watch=Checked(),
        **changes,
    )
    try:
        sim.run(events=3000)
    except EngineError as error:  # the right end of a run whose weights no engine takes, time and again
        if not faults.load or "did not load" not in str(error):
            raise
    sim.core.account.check()


@pytest.mark.parametrize("block", range(10))
def test_conservation_laws_hold_under_every_policy_and_fault_mix(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        try:
            chance_run(seed)
        except Exception as error:
            error.add_note(f"chance_run({seed})")
            raise


@pytest.mark.parametrize(("over_issue", "seed"), [(1.0, 7), (2.0, 5)])
def test_a_rollout_that_may_go_on_gets_the_permit_of_one_whose_budget_is_used_up(
    over_issue: float, seed: int
) -> None:
    # Nothing else comes on an engine all of whose rollouts have used up theirs: the run stood still for ever.
    run = simulation(seed=seed, lag=0, admission=FixedCap(12), scheduling=Partial(600, over_issue))
    run.run()
    assert run.finish is not None
    assert run.finish.status == "done"
