"""Rollouts that a kill left under way go on with their tokens: what counts of their parts, when, and what is accounted."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.core.parts import may_go_on, whole_parts
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.setup import CoreSetup
from paceline.core.waits import waits
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.part import Asked, Part, sampled_crc
from paceline.domain.rollout import Finish, Rollout
from paceline.testing import World, chaos, setup_for, train_env
from paceline.testing.invariants import Invariants
from paceline.testing.script import Plan, Script
from paceline.testing.storm import Record, as_read


def part(number: int, turn: int, before: int, tokens: int, finish: Finish = "abort") -> Part:
    return Part(
        RolloutId(0, 0),
        number,
        turn,
        before,
        turn - 1,
        np.array([1, 2] if not before else [], np.int32),
        np.full(tokens, 3, np.int32),
        np.full(tokens, -0.5, np.float32),
        ((0, tokens),),
        finish,
        Asked(8),
    )


FIRST, SECOND = part(0, 0, 0, 2), part(1, 0, 2, 3, "stop")
THIRD, FOURTH = part(2, 1, 0, 4, "stop"), part(3, 2, 0, 1)


def test_parts_count_as_far_as_they_follow_each_other_and_the_journal_knows_them() -> None:
    assert whole_parts([THIRD, FIRST, SECOND, FOURTH], 4, 99) == (FIRST, SECOND, THIRD, FOURTH)
    assert whole_parts([FIRST, SECOND, THIRD, FOURTH], 3, 99) == (FIRST, SECOND, THIRD)
    assert whole_parts([FIRST, THIRD, FOURTH], 4, 99) == (FIRST,), "the end of a turn was lost"
    assert whole_parts([SECOND, THIRD], 4, 99) == ()
    assert whole_parts([], 0, 99) == ()


def test_a_part_does_not_follow_what_another_life_sampled_in_the_place_of_what_it_goes_on_from() -> None:
    first = msgspec.structs.replace(FIRST, behind=0)
    lost = msgspec.structs.replace(part(1, 0, 2, 3, "stop"), sampled_ids=np.full(3, 7, np.int32))
    at_two = sampled_crc(first.sampled_ids)
    stale = msgspec.structs.replace(SECOND, behind=at_two)
    then = msgspec.structs.replace(THIRD, behind=sampled_crc(lost.sampled_ids, at_two))
    assert whole_parts([first, msgspec.structs.replace(lost, behind=at_two), then], 3, 9)[-1] is then
    assert whole_parts([first, stale, then], 3, 9) == (first, stale)


def test_parts_hold_no_more_tokens_than_the_journal_knows_of() -> None:
    longer = part(
        1, 0, 2, 3
    )  # of a life that the journal has lost the end of; the next one sampled 1 token there
    assert whole_parts([FIRST, longer], 2, 3) == (FIRST,)
    assert whole_parts([FIRST, longer], 2, 5) == (FIRST, longer)


def test_a_part_takes_the_place_of_the_one_that_an_earlier_life_left() -> None:
    again = part(4, 1, 0, 2)
    assert whole_parts([FIRST, SECOND, THIRD, FOURTH, again], 5, 99) == (FIRST, SECOND, again)
    assert whole_parts([FIRST, SECOND, THIRD, FOURTH, again], 4, 99) == (FIRST, SECOND, THIRD, FOURTH)
    behind_a_gap = part(4, 0, 2, 1)
    assert whole_parts([FIRST, THIRD, FOURTH, behind_a_gap], 5, 99) == (FIRST, behind_a_gap)


def test_what_has_heard_no_answer_may_go_on_and_the_rest_if_it_says_so() -> None:
    assert may_go_on((), is_replayable=False)
    assert may_go_on((FIRST,), is_replayable=False)
    assert not may_go_on((FIRST, SECOND), is_replayable=False)
    assert not may_go_on((FIRST, SECOND, THIRD), is_replayable=False)
    assert may_go_on((FIRST, SECOND, THIRD), is_replayable=True)


# ── lives ──


def next_life(first: World, setup: CoreSetup, script: Script, **options: Any) -> tuple[World, Recovery]:
    """What goes on after a kill that lost nothing."""
    records = [Record(at, event, tuple(commands)) for at, event, commands in first.trace.journal]
    recovery = Recovery(EMPTY)
    for seq, at, event, commands in as_read(records):
        recovery.apply(seq, at, event, commands)
    rollouts: dict[RolloutId, Rollout] = {r.id: r for r in first.trace.ended}
    left = {u.id: [p for p in first.trace.parts if p.rollout == u.id] for u in recovery.under_way}
    watch = Invariants()
    for record in records:
        watch.recall(record.event, record.commands)
    world = World(
        setup,
        script,
        recovery=recovery,
        rollouts=rollouts,
        parts={u.id: whole_parts(left[u.id], u.requests, u.sampled) for u in recovery.under_way},
        first_seq=len(records),
        now=first.now,
        **({"watch": watch} | options),
    )
    return world, recovery


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """What a fold knows of flights and of the account, without the order of keys and without zeros."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False)
    account = sorted(
        [split, env, launched, sampled, *({k: v for k, v in places.items() if v} for places in rest)]
        for split, env, launched, sampled, *rest in state["account"]
        if launched
    )
    return {"flights": state["flights"], "account": account}


@pytest.mark.parametrize("seed", range(6))
def test_the_fold_is_the_core_while_rollouts_of_an_earlier_life_go_on(seed: int) -> None:
    setup = msgspec.structs.replace(
        setup_for(train_env("a", group_size=3, max_attempts=2), batch=8, max_steps=30, seed=seed),
        segment_tokens=2,
    )
    first = World(setup, chaos(seed), engines=2, cap=6, watch=Invariants())
    first.run(events=150)
    snapshots: list[dict[str, Any]] = []
    world, recovery = next_life(
        first,
        setup,
        chaos(seed),
        engines=2,
        cap=6,
        replayable=("a",),
        watch=lambda world, event, commands: snapshots.append(plain(world.core.snapshot())),
    )
    world.run(events=250)
    continued = world.trace.events(on.RolloutContinued)
    assert any(event.tokens for _, event in continued)
    records = [Record(at, event, tuple(commands)) for at, event, commands in world.trace.journal]
    seq = len(first.trace.journal)
    rollouts = {r.id: r for r in (*first.trace.ended, *world.trace.ended)}
    for number, (_, at, event, commands) in enumerate(as_read(records)):
        recovery.apply(seq + number, at, event, commands)
        assert plain(recovery.state(rollouts, {})) == snapshots[number], f"after record {seq + number}"


SLOW = Script(plan=lambda rollout, task: Plan(((0.0, 8.0),), tokens=8, reward=float(rollout.member % 2)))
"""One answer of eight tokens, one a second."""


def cut_off(cap: int = 4, **options: Any) -> tuple[World, CoreSetup]:
    """A run that is killed while four answers have four tokens each."""
    setup = msgspec.structs.replace(setup_for(batch=4, lag=0, max_steps=2, **options), segment_tokens=2)
    first = World(setup, SLOW, cap=4, watch=Invariants())
    first.run(until=5.0)
    assert len(first.running) == 4
    return first, setup


def test_a_rollout_goes_on_from_its_tokens_before_anything_new_starts() -> None:
    first, setup = cut_off()
    world, _ = next_life(first, setup, SLOW, cap=2)
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    goes_on = trace.timed(do.ContinueRollout)
    assert [c.tokens for _, c in goes_on] == [4] * 4
    assert [c.started for _, c in goes_on] == [0.0] * 4
    assert [at for at, _ in goes_on] == [5.0, 5.0, 9.0, 9.0], "two permits, and four tokens are left of each"
    assert min(at for at, _ in trace.timed(do.StartRollout)) >= 9.0
    earlier = [r for r in trace.ended if r.id in {c.rollout for _, c in goes_on}]
    assert [(r.outcome.ending, r.id.attempt, r.sampled_tokens) for r in earlier] == [("completed", 0, 8)] * 4
    shipped = [rollout for batch in trace.batches for rollout in batch.rollouts]
    assert sorted(r.id for r in earlier) == sorted(shipped)[:4]
    assert not trace.commands(do.NoteRetry)


def test_those_that_have_tokens_go_on_before_those_that_have_none() -> None:
    def plan(rollout: RolloutId, _task: object) -> Plan:
        waits_s = 4.5 if rollout.member < 2 else 0.0
        return Plan(((waits_s, 8.0),), tokens=8, reward=float(rollout.member % 2))

    setup = msgspec.structs.replace(
        setup_for(train_env(group_size=4), batch=4, max_steps=1), segment_tokens=2
    )
    first = World(setup, Script(plan=plan), cap=4, watch=Invariants())
    first.run(until=5.0)
    world, _ = next_life(first, setup, Script(plan=plan), cap=2)
    trace = world.run()
    goes_on = [(c.rollout.member, c.tokens) for c in trace.commands(do.ContinueRollout)]
    assert goes_on == [(2, 4), (3, 4), (0, 0), (1, 0)]
    assert trace.finish is not None
    assert trace.finish.status == "done"


def test_a_rollout_waits_for_the_weights_that_it_began_with_where_the_trainer_makes_them_again() -> None:
    setup = msgspec.structs.replace(setup_for(batch=4, lag=0, max_staleness=0, max_steps=3), segment_tokens=2)
    first = World(setup, SLOW, cap=4, watch=Invariants())
    first.run(until=14.0)
    assert first.core.fleet.held == 1
    world, _ = next_life(first, setup, SLOW, cap=4, trained=0)
    trace = world.run()
    (loaded,) = [at for at, event in trace.events(on.WeightsLoaded) if event.version == 1]
    assert loaded == 15.0
    assert [at for at, _ in trace.timed(do.ContinueRollout)] == [loaded] * 4
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert not [r for r in trace.ended if r.outcome.cause == "stale"]


def test_tokens_that_are_lost_are_accounted_as_failed_and_the_rest_trains() -> None:
    first, setup = cut_off()
    script = Script(plan=SLOW.plan, leaves=lambda rollout, now: 0 if rollout == RolloutId(0, 1) else None)
    world, _ = next_life(first, setup, script, cap=4)
    trace = world.run()
    (strayed,) = [e for _, e in trace.events(on.RolloutContinued) if e.lost]
    assert (strayed.rollout, strayed.tokens, strayed.lost, strayed.turns) == (RolloutId(0, 1), 0, 4, 0)
    account = world.core.account.of("train", "env")
    assert account.tokens["failed"] == 4
    assert account.rollouts.get("failed", 0) == 0
    (again,) = [r for r in trace.ended if r.id == RolloutId(0, 1)]
    assert (again.outcome.ending, again.sampled_tokens) == ("completed", 8)


def test_what_goes_on_is_cancelled_when_it_grows_stale_or_the_run_is_stopped_before_an_engine_is_there() -> (
    None
):
    first, setup = cut_off()
    world, _ = next_life(first, setup, SLOW, cap=2)
    world.shut_down()
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "stopped"
    goes_on = {c.rollout: c.engine for c in trace.commands(do.ContinueRollout)}
    assert sorted(goes_on.values()) == ["", "", "e0", "e0"], "those without a permit are begun to be ended"
    assert {r.id: r.outcome.cause for r in trace.ended} == dict.fromkeys(goes_on, "shutdown")
    world.core.account.check()


def test_the_deadline_counts_what_was_used_before_the_kill() -> None:
    first, setup = cut_off()
    world, _ = next_life(first, setup, Script(plan=SLOW.plan, deadline_s=7.0), cap=4)
    trace = world.run(until=7.5)
    ended = [r for r in trace.ended if r.outcome.ending == "truncated"]
    assert [(r.outcome.cause, r.ended) for r in ended] == [("deadline", 7.0)] * 4


def test_no_wait_to_go_on_is_taken_off_the_deadline_however_often_the_run_is_killed_in_it() -> None:
    hurried = Script(plan=SLOW.plan, deadline_s=9.5)
    first, setup = cut_off()
    second, _ = next_life(first, setup, hurried, cap=2)
    second.run(until=7.0)
    records = [Record(at, e, tuple(c)) for w in (first, second) for at, e, c in w.trace.journal]
    recovery = Recovery(EMPTY)
    for seq, at, event, commands in as_read(records):
        recovery.apply(seq, at, event, commands)
    kept = {
        left.id: whole_parts(
            [p for w in (first, second) for p in w.trace.parts if p.rollout == left.id],
            left.requests,
            left.sampled,
        )
        for left in recovery.under_way
    }
    third = World(
        setup,
        hurried,
        cap=1,
        recovery=recovery,
        rollouts={},
        parts=kept,
        first_seq=len(records),
        now=7.0,
    )
    trace = third.run()
    went_on = [(at, c.stood_s) for at, c in trace.timed(do.ContinueRollout)]
    assert went_on == [(7.0, 0.0), (9.0, 2.0), (11.0, 6.0), (15.0, 10.0)], "two of them waited from 5.0 on"
    earlier = [r for r in trace.ended if r.id in {left.id for left in recovery.under_way}]
    assert [(r.outcome.ending, r.ended) for r in earlier] == [
        ("completed", at) for at in (9.0, 11.0, 15.0, 19.0)
    ]


def test_what_waits_for_its_rate_to_go_on_has_its_whole_deadline_left() -> None:
    def plan(rollout: RolloutId, _task: object) -> Plan:
        return Plan(((0.0, 15.0),), 4, reward=float(rollout.member))

    script = Script(plan=plan, deadline_s=60.0)
    first = World(setup_for(train_env(group_size=4), batch=64, max_steps=1), script, cap=64)
    first.run(until=10.0)
    assert len(first.running) == 64
    slowly = setup_for(train_env(group_size=4, tasks_per_minute=12.0), batch=64, max_steps=1)
    world, _ = next_life(first, slowly, script, cap=64)
    trace = world.run(until=400.0)
    went_on = trace.timed(do.ContinueRollout)
    assert went_on[-1][0] > 300.0
    ended = {r.id: r.outcome.ending for r in trace.ended}
    assert [ended[c.rollout] for _, c in went_on] == ["completed"] * 64


def test_what_waits_for_a_permit_is_told_by_that() -> None:
    first, setup = cut_off()
    world, _ = next_life(first, setup, SLOW, cap=2)
    (found,) = [wait for wait in waits(world.core) if "a permit, to go on after the restart" in wait.what]
    assert (found.since, found.others) == (5.0, 1)


def test_what_is_to_stop_is_told_to_wait_for_its_environment_whatever_it_waited_for_before() -> None:
    first, setup = cut_off()
    world, _ = next_life(first, setup, SLOW, cap=2)
    world.core.handle(on.ShutdownRequested("enough"), world.now)
    (found,) = [wait for wait in waits(world.core) if "to stop (shutdown)" in wait.what]
    assert found.others == 3
    assert not [wait for wait in waits(world.core) if "a permit" in wait.what]
