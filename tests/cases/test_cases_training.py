"""Cases about what trains: staleness, baselines, signal, batches. The numbers are those of the cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.advantages import builtin
from paceline.core.batching import BatchList
from paceline.core.packing import pack
from paceline.core.processing import GroupRules
from paceline.core.samples import build_samples
from paceline.core.staleness import oldest_allowed, staleness
from paceline.domain import commands as do
from paceline.domain.batch import Batch
from paceline.domain.group import Verdict
from paceline.domain.ids import RolloutId, Version
from paceline.domain.rollout import COMPLETED, Outcome, Rollout, Turn, VersionRuns
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, Plan, Script, World, alternating, setup_for, train_env

BROKEN = Outcome("failed", "environment", "RuntimeError: boom")


def turn(prompt: int, versions: VersionRuns, *, extends: bool = True) -> Turn:
    sampled = sum(n for _, n in versions)
    return Turn(
        np.ones(prompt, np.int32),
        np.full(sampled, 7, np.int32),
        np.full(sampled, -0.5, np.float32),
        versions,
        extends,
        "stop",
    )


def verdict(group: int, member: int, *turns: Turn) -> Verdict:
    rollout = Rollout(
        id=RolloutId(group, member),
        task=TaskRef("env", "train", group),
        outcome=COMPLETED,
        turns=turns,
        reward=1.0,
    )
    return Verdict(rollout.id, "queued", samples=build_samples(rollout, seq_len=1000, overlong="cut").samples)


def rewarded(*groups: list[float | None]) -> tuple[World, list[list[float | None]]]:
    """Groups with these rewards (None: it failed), run to the end; the advantages by group."""

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        reward = groups[rollout.group][rollout.member]
        return Plan(reward=reward, outcome=BROKEN if reward is None else COMPLETED)

    setup = setup_for(
        train_env(tasks=len(groups), epochs=1, group_size=len(groups[0])), batch=4, max_steps=99
    )
    world = World(setup, Script(plan=plan), cap=8, watch=Invariants())
    results = world.run().results
    return world, [[v.advantage for v in results[n].verdicts] for n in range(len(groups))]


@pytest.mark.parametrize(
    ("bound", "sampled", "trained", "kept"),
    [(0, 5, 5, True), (0, 5, 6, False), (2, 5, 7, True), (2, 5, 8, False)],
)
def test_s14_the_staleness_bound_is_exact(bound: int, sampled: Version, trained: Version, kept: bool) -> None:
    step = trained + 1
    assert staleness(sampled, step) == trained - sampled
    assert (sampled >= oldest_allowed(step, bound)) is kept
    waiting = BatchList(rollouts=1)
    waiting.add(verdict(0, 0, turn(2, ((sampled, 4),))), "env")
    waiting.sweep(step, bound, {"env": "drop"})
    assert waiting.ready() is kept


def test_s14_a_rollout_that_went_on_under_newer_weights_counts_from_its_oldest_token() -> None:
    waiting = BatchList(rollouts=1)
    waiting.add(verdict(0, 0, turn(2, ((5, 2), (6, 2))), turn(2, ((6, 3),))), "env")
    [swept] = waiting.sweep(8, 1, {"env": "drop"})
    assert swept.staleness == 2


def test_s15_what_aged_in_the_queue_is_dropped_before_the_batch_is_judged_full() -> None:
    waiting = BatchList(rollouts=4)
    for member in range(2):
        waiting.add(verdict(0, member, turn(2, ((5, 4),))), "env")
    for member in range(2):
        waiting.add(verdict(1, member, turn(2, ((9, 4),))), "env")
    swept = waiting.sweep(10, 2, {"env": "drop"})
    assert [(s.rollout.group, s.env, s.staleness) for s in swept] == [(0, "env", 4)] * 2
    assert all(s.reason.startswith("stale in queue") for s in swept)
    assert not waiting.ready()
    for member in range(2):
        waiting.add(verdict(2, member, turn(2, ((9, 4),))), "env")
    assert [r.group for r in waiting.cut(10).rollouts] == [1, 1, 2, 2]


def test_s15_through_the_core_a_drop_is_noted_counted_and_filled_again() -> None:
    # Groups of 3 into strictly on-policy batches of 4: two of each second group wait for a version too new for them.
    setup = setup_for(train_env(group_size=3), batch=4, lag=0, max_staleness=0, max_steps=4)
    world = World(setup, Script(reward=alternating), cap=16, watch=Invariants())
    trace = world.run()
    assert [len(batch.rollouts) for batch in trace.batches] == [4] * 4
    noted = trace.commands(do.NoteStale)
    assert noted
    assert {note.action for note in noted} == {"dropped"}
    assert world.core.account.of("train", "env").rollouts["stale"] == len(noted)


def test_s30_the_baseline_is_the_groups_own_whatever_the_order_of_arrival() -> None:
    arrives = {(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0, (1, 1): 4.0}
    script = Script(
        seconds=lambda r, _t: arrives[r.group, r.member],
        reward=lambda r, _t, _s: float((r.group, r.member) == (0, 0)),
    )
    trace = World(setup_for(train_env(tasks=2, epochs=1)), script, cap=4, watch=Invariants()).run()
    assert [(r.id.group, r.reward) for r in trace.ended] == [(0, 1.0), (1, 0.0), (0, 0.0), (1, 0.0)]
    assert [v.advantage for v in trace.results[0].verdicts] == [0.5, -0.5]
    assert [v.advantage for v in trace.results[1].verdicts] == [0.0, 0.0]
    assert trace.results[1].dead == "zero_signal"


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_std", "dr_grpo", "rloo"])
def test_s31_survivors_three_one_and_none(algorithm: str) -> None:
    rewards = ([1.0, 0.0, 0.0, None], [1.0, None, None, None], [None] * 4)

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        reward = rewards[rollout.group][rollout.member]
        return Plan(reward=reward, outcome=BROKEN if reward is None else COMPLETED)

    setup = setup_for(train_env(tasks=3, epochs=1, group_size=4), max_steps=9)
    world = World(setup, Script(plan=plan), cap=12, algorithm=builtin(algorithm, {}), watch=Invariants())
    results = world.run().results
    given = [v.advantage for n in range(3) for v in results[n].verdicts if v.advantage is not None]
    assert all(math.isfinite(a) for a in given)
    assert [results[n].dead for n in range(3)] == [None, "zero_signal", "failed"]
    if algorithm == "grpo":
        assert given == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0])
    assert world.core.account.of("train", "env").launched == 12


def test_s43_a_source_that_runs_dry_ships_what_it_has() -> None:
    script = Script(
        seconds=lambda r, _t: 9.0 if r.group == 3 else 1.0,
        reward=lambda r, _t, _s: float(r.group != 2 and r.member),
    )
    for short_last, shipped, left in ((True, [6], 0), (False, [], 6)):
        setup = setup_for(train_env(tasks=4, epochs=1), batch=8, short_last=short_last)
        world = World(setup, script, cap=8, watch=Invariants())
        trace = world.run()
        assert trace.finish is not None
        assert trace.finish.reason == "every source is exhausted"
        assert [len(batch.rollouts) for batch in trace.batches] == shipped
        assert world.core.account.of("train", "env").rollouts.get("left_over", 0) == left


def test_s44_signal_is_spread_not_value() -> None:
    world, _ = rewarded([1.3] * 4, [-0.4] * 4)
    assert [r.dead for r in world.trace.results.values()] == ["zero_signal"] * 2
    world, [advantages] = rewarded([1.0, 1.3])
    assert advantages == pytest.approx([-0.15, 0.15])
    assert world.core.account.of("train", "env").rollouts["shipped"] == 2


def test_s45_a_token_threshold_counts_what_ships() -> None:
    waiting = BatchList(tokens=100)
    # 60 ids; then a branch of 70 ids in which nothing was sampled.
    waiting.add(verdict(0, 0, turn(40, ((0, 20),)), turn(70, (), extends=False)), "env")
    assert (waiting.tokens, waiting.ready()) == (60, False)
    waiting.add(verdict(1, 0, turn(25, ((0, 20),))), "env")
    assert (waiting.tokens, waiting.ready()) == (105, True)
    batch = waiting.cut(1)
    assert (len(batch.samples), batch.tokens) == (2, 105)


def test_s46_rollouts_that_a_filter_removed_stay_in_the_books_of_the_step() -> None:
    script = Script(reward=lambda r, _t, _s: float(r.group == 1 and r.member))
    setup = setup_for(batch=2, max_steps=1, lag=0)
    world = World(setup, script, cap=2, watch=Invariants())
    trace = world.run()
    [batch] = trace.batches
    assert {r.group for r in batch.rollouts} == {1}
    fates = [v.fate for result in trace.results.values() for v in result.verdicts]
    assert fates == ["zero_signal", "zero_signal", "queued", "queued"]


def test_s47_uneven_sample_counts_make_a_valid_batch_for_every_rank() -> None:
    again = [turn(2, ((0, 4),), extends=False) for _ in range(3)]
    verdicts = [verdict(0, member, *again[:count]) for member, count in enumerate((1, 1, 3, 2))]
    batch = Batch(
        step=1,
        samples=tuple(s for v in verdicts for s in v.samples),
        rollouts=tuple(v.rollout for v in verdicts),
    )
    packed = pack(batch, ranks=4, micro_batch_tokens=8)
    micro = [m for rank in packed.ranks for m in rank]
    assert len({len(rank) for rank in packed.ranks}) == 1, "every rank has the same number of micro-batches"
    assert sorted(int(i) for m in micro for i in m.sample_index) == list(range(7)), (
        "each sample is there once"
    )
    assert sum(int(m.trainable.sum()) for m in micro) == 7 * 4, "padding is not trainable"
    assert all(not m.advantages[~m.trainable].any() for m in micro)


def test_s48_surplus_is_kept_and_comes_first() -> None:
    setup = setup_for(train_env(group_size=3), batch=4, lag=2, max_staleness=4, max_steps=3)
    trace = World(setup, Script(reward=alternating), cap=9, watch=Invariants()).run()
    order = [RolloutId(group, member) for group in range(4) for member in range(3)]
    assert [r for batch in trace.batches for r in batch.rollouts] == order
    assert [len(batch.rollouts) for batch in trace.batches] == [4, 4, 4]
    assert trace.shipped_at[:2] == [1.0, 1.0]
    assert trace.batches[2].rollouts[0] == RolloutId(2, 2), "the one left over is first in the next batch"


def test_s56_a_small_source_is_walked_through_again_in_a_new_order() -> None:
    def run(seed: int) -> World:
        source = train_env(tasks=5, sampler="shuffled")
        setup = setup_for(source, batch=8, lag=0, max_staleness=0, max_steps=10, seed=seed)
        world = World(setup, Script(reward=alternating), cap=8, watch=Invariants())
        world.run()
        return world

    trace = run(seed=3).trace
    groups = trace.shipped_groups()
    assert len(groups) == 40
    tasks = [task for _, task in groups.values()]
    assert all(tasks.count(task) == 8 for task in range(5))
    drawn = {c.rollout.group: c.task for c in trace.launched}
    epochs = [[drawn[g].index for g in sorted(drawn) if drawn[g].epoch == epoch] for epoch in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in epochs)
    assert len({tuple(order) for order in epochs}) > 1
    assert run(seed=3).trace.encoded() == trace.encoded()
    assert run(seed=4).trace.encoded() != trace.encoded()


def test_s56_two_draws_of_one_task_in_flight_do_not_mix() -> None:
    setup = setup_for(train_env(tasks=1, group_size=2), batch=4, max_steps=2)
    script = Script(
        seconds=lambda r, _t: 1.0 + r.group % 2, reward=lambda r, _t, _s: float(r.group + r.member)
    )
    world = World(setup, script, cap=8, watch=Invariants())
    world.run(until=0.5)
    assert {g.task.index for g in world.core.groups.groups()} == {0}
    assert len(world.core.groups) >= 2
    for result in world.run().results.values():
        if result.dead is None:
            assert [v.advantage for v in result.verdicts] == [-0.5, 0.5]


def test_rules_by_environment_reach_their_groups() -> None:
    seen: list[str] = []

    def rules(env: str) -> GroupRules:
        seen.append(env)
        return GroupRules(env=env, seq_len=64)

    envs = (train_env(env, tasks=3, epochs=1) for env in "ab")
    World(setup_for(*envs, max_steps=9), Script(reward=alternating), cap=4, rules=rules).run()
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3
