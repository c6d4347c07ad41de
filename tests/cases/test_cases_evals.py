"""Cases about evals: which are due, that they are whole, and that they and training do not wait for each other."""

from __future__ import annotations

import pytest

from paceline.config import EvalSection
from paceline.core.evaluation import EvalPlan
from paceline.domain import commands as do
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, Plan, Script, World, alternating, setup_for


def held(**more: object) -> EvalSection:
    return EvalSection.model_validate({"id": "held", **more})


def test_s06_an_eval_waits_for_completions_not_for_successes() -> None:
    setup = setup_for(max_steps=1, evals=[held(examples=4, every=100)])

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        if task.split == "eval" and task.index == 2:
            return Plan(((0.0, 1.0),), outcome=Outcome("failed", "data", "rejected"))
        return Plan(((0.0, 1.0),), reward=float(rollout.member))

    trace = World(setup, Script(plan=plan), cap=8, watch=Invariants()).run()
    report = trace.evals[0]
    assert (report.rollouts, report.scored) == (4, 3)
    assert report.by_ending == {"completed": 3, "failed": 1}
    assert trace.finish is not None
    assert trace.finish.status == "done"


def test_s80_evals_due_at_the_end_are_finished_although_training_has_stopped() -> None:
    setup = setup_for(max_steps=4, lag=0, max_staleness=0, evals=[held(examples=6, every=4, at_start=False)])
    script = Script(reward=alternating, seconds=lambda _r, task: 7.0 if task.split == "eval" else 1.0)
    world = World(setup, script, cap=4, watch=Invariants())
    trace = world.run()
    assert [(r.version, r.rollouts) for r in trace.evals] == [(4, 6)]
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert world.now <= trace.shipped_at[-1] + 1.0 + 2 * 7.0 + 10.0


def test_s80_training_rollouts_are_cancelled_when_the_last_batch_is_cut() -> None:
    setup = setup_for(max_steps=1, evals=[held(examples=6, every=1, at_start=False)])
    script = Script(
        reward=alternating, seconds=lambda r, task: 50.0 if r.group > 1 and task.split == "train" else 1.0
    )
    world = World(setup, script, cap=8, watch=Invariants())
    trace = world.run()
    cancelled = trace.timed(do.CancelRollout)
    assert {(at, c.cause) for at, c in cancelled} == {(trace.shipped_at[0], "surplus")}
    assert [r.rollouts for r in trace.evals] == [6]
    assert world.now < 11.0


def test_s82_nothing_in_flight_and_nothing_queued_is_not_the_end_while_members_are_owed() -> None:
    setup = setup_for(max_steps=1, evals=[held(examples=2, k=3, every=1, at_end=False)])
    world = World(setup, Script(reward=alternating), cap=2, watch=Invariants())
    trace = world.run()
    [report] = [r for r in trace.evals if r.version == 0]
    assert (report.rollouts, report.scored) == (6, 6)


def test_s83_evals_do_not_age_and_go_on_while_training_waits_for_weights() -> None:
    setup = setup_for(
        lag=0, max_staleness=0, max_steps=6, evals=[held(examples=8, every=100)], eval_share=0.5
    )
    turns = {"eval": ((0.0, 1.0),) * 12, "train": ((0.0, 1.0),)}
    long = Script(plan=lambda r, task: Plan(turns[task.split], reward=float(r.member)))
    trace = World(setup, long, cap=8, watch=Invariants()).run()
    report = trace.evals[0]
    assert report.by_ending == {"completed": 8}
    assert report.newest_version >= 5 > report.version == 0
    assert not [c for c in trace.commands(do.CancelRollout) if c.cause == "stale"]

    slow = Script(reward=alternating, train_s=lambda _s: 100.0)
    trace = World(setup, slow, cap=2, watch=Invariants()).run(until=90.0)
    closed = trace.shipped_at[0]
    started = [c.task.split for at, c in trace.timed(do.StartRollout) if at > closed]
    assert started
    assert set(started) == {"eval"}, "with the gate closed only evals start"


def test_s84_fresh_runs_measure_each_point_once() -> None:
    setup = setup_for(max_steps=12, evals=[held(examples=1, every=5, at_end=False)])
    trace = World(setup, Script(reward=alternating), cap=4, watch=Invariants()).run()
    assert [r.version for r in trace.evals] == [0, 5, 10]


@pytest.mark.parametrize(("stopped_after", "versions"), [("completed", [15]), ("crashed", [10, 15])])
def test_s84_a_resumed_run_measures_again_only_what_was_cut_short(
    stopped_after: str, versions: list[int]
) -> None:
    setup = setup_for(max_steps=18, evals=[held(examples=1, every=5, at_end=False)])
    plan = EvalPlan([held(examples=1, every=5)], last=18)
    plan.complete("held", 10 if stopped_after == "completed" else 5)
    first = World(setup_for(max_steps=10), Script(reward=alternating), cap=4)
    first.run()
    state = {**first.trace.checkpoints[-1][1], "plan": plan.snapshot()}
    trace = World(setup, Script(reward=alternating), cap=4, state=state, watch=Invariants()).run()
    assert [r.version for r in trace.evals] == versions


def test_s84_a_point_that_was_jumped_over_is_measured_with_the_version_that_came() -> None:
    loads = {4: 0.0, 5: 0.0}
    setup = setup_for(max_steps=9, lag=3, evals=[held(examples=1, every=5, at_start=False, at_end=False)])
    script = Script(
        reward=alternating,
        train_s=lambda _s: 1.0,
        load_s=lambda _e, version: 2.5 if version == 4 else loads.get(version, 0.0),
    )
    trace = World(setup, script, cap=16, watch=Invariants()).run()
    loaded = [c.version for c in trace.commands(do.UpdateWeights)]
    assert 5 not in loaded
    assert [r.version for r in trace.evals] == [6]


def test_s84_two_evals_have_their_own_timetables() -> None:
    evals = [held(name="five", every=5, examples=1), held(name="three", every=3, examples=1)]
    trace = World(
        setup_for(max_steps=10, evals=evals), Script(reward=alternating), cap=4, watch=Invariants()
    ).run()
    points = {name: [r.version for r in trace.evals if r.env == name] for name in ("five", "three")}
    assert points == {"five": [0, 5, 10], "three": [0, 3, 6, 9, 10]}


@pytest.mark.parametrize("k", [1, 3])
def test_s85_every_example_is_rolled_out_exactly_k_times(k: int) -> None:
    def right(rollout: RolloutId, task: TaskRef, seed: int) -> float:
        return float(task.index < 5) if task.split == "eval" else alternating(rollout, task, seed)

    means = set()
    for cap in (4, 16):
        setup = setup_for(max_steps=1, evals=[held(examples=10, k=k, every=1, at_end=False)])
        trace = World(setup, Script(reward=right), engines=2, cap=cap // 2, watch=Invariants()).run()
        report = trace.evals[0]
        assert report.rollouts == 10 * k
        measured = {g: t for g, t in ((c.rollout.group, c.task) for c in trace.launched) if t.split == "eval"}
        tried = [
            r.task.index for r in trace.ended if r.task.split == "eval" and r.id.group in list(measured)[:10]
        ]
        assert all(tried.count(example) == k for example in range(10))
        means.add(report.mean_reward)
    assert means == {0.5}
