"""Cases about starting, ending and accounting for rollouts. The numbers are those of the cases."""

from __future__ import annotations

import pytest

from paceline.config import LengthFilter
from paceline.core.processing import GroupRules
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineLoad
from paceline.domain.rollout import COMPLETED, Outcome
from paceline.domain.task import TaskRef
from paceline.errors import NoProgressError
from paceline.testing import Invariants, Plan, Script, World, alternating, setup_for, train_env

BROKEN = Outcome("failed", "environment", "RuntimeError: boom")


def alone(env: str) -> GroupRules:
    """Groups of one have no siblings to compare with, so here they train without."""
    return GroupRules(env=env, seq_len=64, zero_advantage=False)


def test_s02_permits_freed_during_a_sweep_are_refilled_and_the_ledger_is_what_runs() -> None:
    long = {2, 3, 4}
    script = Script(
        seconds=lambda r, _t: 100.0 if r.group in long else 1.0,
        cancel_s=lambda r: float(r.group),  # one after the other: 2 s, 3 s, 4 s
        train_s=lambda _step: 0.5,
    )
    setup = setup_for(train_env(group_size=1), batch=2, lag=2, max_staleness=2, max_steps=12)
    watched: list[tuple[int, int]] = []
    invariants = Invariants()

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        invariants(world, event, commands)  # set(ledger) == set(running), launched - ended == in flight
        assert len(world.running) <= 5
        watched.append((len(world.trace.commands(do.CancelRollout)), len(world.running)))

    trace = World(setup, script, cap=5, rules=alone, watch=watch).run()
    swept = trace.timed(do.CancelRollout)[:3]
    assert [(c.rollout.group, c.cause) for _, c in swept] == [(2, "stale"), (3, "stale"), (4, "stale")]
    at = swept[0][0]
    refilled = [t for t, _ in trace.timed(do.StartRollout) if at + 2 <= t < at + 4]
    assert len(refilled) >= 2, "a permit that came back during the sweep was not used"


def test_s03_a_rollout_that_never_answers_is_cut_at_its_deadline_and_its_group_closes() -> None:
    script = Script(
        seconds=lambda r, _t: float("inf") if (r.group, r.member) == (0, 3) else 1.0,
        reward=alternating,
        deadline_s=5.0,
    )
    world = World(setup_for(train_env(group_size=4), lag=4), script, cap=4, watch=Invariants())
    trace = world.run(until=6.0)
    [late] = [r for r in trace.ended if (r.id.group, r.id.member) == (0, 3)]
    assert (late.outcome.ending, late.outcome.cause, late.ended) == ("truncated", "deadline", 5.0)
    assert late.id not in world.running
    verdicts = trace.results[0].verdicts
    assert [v.fate for v in verdicts] == ["queued", "queued", "queued", "truncated"]
    assert verdicts[3].advantage is None, (
        "it counts toward the size of the group and is left out of the baseline"
    )
    assert any(at == 5.0 for at, _ in trace.timed(do.StartRollout)), "its permit was not used again"


def test_s04a_a_group_that_trains_ends_a_streak_of_dead_ones() -> None:
    script = Script(reward=lambda r, _t, _s: float(r.group == 5 and r.member == 0))
    setup = setup_for(train_env(tasks=11, epochs=1), dead_group_limit=6)
    trace = World(setup, script, cap=2, watch=Invariants()).run()
    assert [r.dead for r in trace.results.values()] == ["zero_signal"] * 5 + [None] + ["zero_signal"] * 5
    assert trace.finish is not None
    assert trace.finish.status == "done"


def test_s04b_nothing_but_dead_groups_ends_the_run_with_the_counts_of_each_death() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        all_fail, one_fails, too_long = (rollout.group % 3 == n for n in range(3))
        fails = all_fail or (one_fails and rollout.member == 0)
        return Plan(
            reward=float(rollout.member), tokens=8 if too_long else 4, outcome=BROKEN if fails else COMPLETED
        )

    def rules(env: str) -> GroupRules:
        return GroupRules(
            env=env, seq_len=64, all_or_nothing=True, pre=(LengthFilter(type="length", max_tokens=4),)
        )

    world = World(setup_for(dead_group_limit=6), Script(plan=plan), cap=2, rules=rules, watch=Invariants())
    with pytest.raises(NoProgressError) as caught:
        world.run()
    assert "7 groups in a row" in str(caught.value)
    assert "failed 3, void 2, filtered 2" in str(caught.value)
    assert "RuntimeError: boom" in str(caught.value)


def test_s08_a_version_is_taken_in_and_a_stop_obeyed_while_the_cap_is_full() -> None:
    script = Script(seconds=lambda r, _t: 60.0 if r.group else 0.5, train_s=lambda _step: 0.5)
    setup = setup_for(train_env(group_size=1), batch=1)
    world = World(setup, script, cap=1, rules=alone, watch=Invariants())
    world.run(until=1.0)
    assert len(world.running) == 1, "the cap is full"
    assert world.core.fleet.held == 1, "v1 was published at 1 s"
    world.at(2.0, world.shut_down)
    trace = world.run()
    assert trace.finish is not None
    assert (trace.finish.status, world.now) == ("stopped", 2.0)


def test_s09_one_failure_leaves_its_finished_siblings_alone() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        fails = (rollout.group, rollout.member) == (0, 1)
        return Plan(
            ((0.0, 3.0 if fails else 1.0),),
            reward=float(rollout.member == 0),
            outcome=BROKEN if fails else COMPLETED,
        )

    setup = setup_for(train_env(tasks=2, epochs=1, group_size=4), batch=8, max_steps=1)
    trace = World(setup, Script(plan=plan), cap=8, watch=Invariants()).run()
    assert sorted(v.fate for v in trace.results[0].verdicts) == ["failed", "queued", "queued", "queued"]
    assert [v.fate for v in trace.results[1].verdicts] == ["queued"] * 4
    assert not trace.commands(do.CancelRollout)
    [failed] = [r for r in trace.ended if r.outcome.ending == "failed"]
    assert failed.outcome.detail == "RuntimeError: boom"


def test_s10_the_over_aged_are_not_tried_again_and_fast_ones_keep_shipping() -> None:
    script = Script(seconds=lambda _r, task: 25.0 if task.index < 3 else 2.0, train_s=lambda _step: 10.0)
    setup = setup_for(train_env(group_size=1), batch=4, lag=1, max_staleness=1, max_steps=100)
    world = World(setup, script, cap=4, rules=alone, watch=Invariants())
    trace = world.run(until=100.0)
    slow = [r for r in trace.ended if r.task.index < 3]
    assert len([c for c in trace.launched if c.task.index < 3]) == 3, "each is tried once"
    assert sum(r.ended for r in slow) <= 3 * 25.0
    assert len(trace.batches) >= 9, "a version every 10 s needs a batch every 10 s"
    assert world.core.account.of("train", "env").rollouts["stale"] == 3


def test_s11_a_hole_in_a_strictly_on_policy_batch_is_filled_at_once() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        return Plan(reward=float(rollout.member), outcome=BROKEN if task.index == 2 else COMPLETED)

    setup = setup_for(batch=8, lag=0, max_staleness=0, max_steps=1)
    trace = World(setup, Script(plan=plan), cap=8, watch=Invariants()).run()
    assert [c.task.index for c in trace.launched] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    first_version = trace.events(on.PolicyPublished)[0][0]
    assert trace.timed(do.StartRollout)[-1][0] < first_version, "it waited for the trainer"
    assert set(trace.shipped_groups().values()) == {("env", 0), ("env", 1), ("env", 3), ("env", 4)}
    assert [r.dead for r in trace.results.values()].count("failed") == 1


@pytest.mark.parametrize("bound", [3, 2, 1])
def test_s12_slow_tasks_train_as_often_as_they_are_drawn_or_their_loss_is_counted(bound: int) -> None:
    envs = (train_env(name, tasks=200, epochs=1) for name in ("fast", "slow"))
    setup = setup_for(*envs, batch=8, lag=1, max_staleness=bound, max_steps=1000)
    script = Script(
        reward=alternating,
        seconds=lambda _r, task: 0.9 if task.env == "fast" else 2.9,
        train_s=lambda _step: 1.0,
    )
    world = World(setup, script, cap=64, watch=Invariants())
    world.run()
    fast, slow = (world.core.account.of("train", env).rollouts for env in ("fast", "slow"))
    if bound >= 2:
        # Pacing holds admission back until the slow ones are in, so that they train.
        assert slow["shipped"] / (slow["shipped"] + fast["shipped"]) == pytest.approx(0.5, abs=0.05)
    else:
        # Three steps do not fit into one: what that costs is counted for the environment that pays it.
        assert slow["stale"] > 100
        assert slow["stale"] + slow["shipped"] == 400
        assert "stale" not in fast


def test_s13_the_drawn_share_and_the_trained_share_are_both_known() -> None:
    def reward(rollout: RolloutId, task: TaskRef, seed: int) -> float:
        return float(rollout.member == 0 and (task.env == "b" or task.index < 2))

    setup = setup_for(*(train_env(env, tasks=10, epochs=1) for env in "ab"), max_steps=100)
    world = World(setup, Script(reward=reward), cap=4, watch=Invariants())
    world.run()
    a, b = (world.core.account.of("train", env) for env in "ab")
    assert a.launched / (a.launched + b.launched) == 0.5
    shipped = a.rollouts["shipped"], b.rollouts["shipped"]
    assert shipped == (4, 20)
    assert shipped[0] / sum(shipped) == pytest.approx(4 / 24)


def test_s18_strictly_on_policy_starts_and_waits_for_the_new_version() -> None:
    setup = setup_for(lag=0, max_staleness=0, batch=4, max_steps=3)
    trace = World(setup, Script(reward=alternating), cap=64, watch=Invariants()).run()
    starts = [at for at, _ in trace.timed(do.StartRollout)]
    loads = [at for at, _ in trace.events(on.WeightsLoaded)]
    assert starts[:4] == [0.0] * 4
    assert len(trace.batches) == 3
    for n in (1, 2):
        assert starts[4 * n] >= loads[n - 1], "a rollout started before the version that its batch trains"


def test_s49_every_ending_gives_its_place_back_on_its_engine() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        kind = rollout.group % 4
        seconds = 50.0 if kind == 2 else 1.0
        return Plan(((0.0, seconds),), reward=1.0, outcome=BROKEN if kind == 1 else COMPLETED)

    setup = setup_for(train_env(tasks=100, epochs=1, group_size=1), max_staleness=1, max_steps=1000)
    world = World(setup, Script(plan=plan), engines=2, cap=6, rules=alone, watch=Invariants())
    trace = world.run()
    endings = {(r.outcome.ending, r.outcome.cause) for r in trace.ended}
    assert {("completed", None), ("failed", "environment"), ("cancelled", "stale")} <= endings
    assert [engine.in_flight for engine in world.core.fleet.engines()] == [0, 0]
    assert len({c.group for c in trace.commands(do.ForgetGroup)}) == 100, "sessions are told to go"
    placed = []
    for _ in range(10):
        engine = world.core.fleet.place(None)
        assert engine is not None
        engine.in_flight += 1
        engine.touch()
        placed.append(engine.id)
    assert (placed.count("e0"), placed.count("e1")) == (5, 5)


def test_s71_a_fixed_cap_stays_whatever_the_engine_says() -> None:
    world = World(setup_for(lag=8), Script(seconds=lambda _r, _t: 5.0, reward=alternating), engines=2, cap=10)
    readings = [
        EngineLoad(running=10, waiting=90, kv_usage=1.0, preemptions=3),
        EngineLoad(running=0, waiting=0, kv_usage=0.0, preemptions=0),  # it was restarted: the counter fell
        None,
    ]
    for number, load in enumerate(readings):
        world.at(number + 1.0, lambda load=load: world.post(on.LoadReported("e0", load)))  # type: ignore[misc]
    trace = world.run(until=4.0)
    assert world.core.fleet.cap() == 20
    assert trace.peak_in_flight == 20
    assert not trace.commands(do.CancelRollout)
