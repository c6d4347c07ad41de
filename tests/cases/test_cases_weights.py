"""Cases about new weights: which version samples what, and in which order things happen around an update."""

from __future__ import annotations

import pytest

from paceline.core.processing import GroupRules
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.errors import EngineError
from paceline.testing import Invariants, Plan, Script, World, alternating, setup_for, train_env


def alone(env: str) -> GroupRules:
    """Groups of one have no siblings to compare with, so here they train without."""
    return GroupRules(env=env, seq_len=64, zero_advantage=False)


def test_s59_an_engine_that_joins_with_base_weights_gets_nothing_until_it_has_loaded() -> None:
    script = Script(reward=alternating, load_s=lambda engine, _v: 3.0 if engine == "late" else 0.0)
    world = World(setup_for(max_steps=20), script, cap=4, watch=Invariants())
    while world.core.fleet.held < 7:
        world.run(until=world.now + 0.5)
    joined = world.now
    world.join("late", 0)
    trace = world.run()
    [loaded, *_] = [(at, e) for at, e in trace.events(on.WeightsLoaded) if e.engine == "late"]
    assert loaded[1].version == 7
    assert loaded[0] == joined + 3.0
    starts = [(at, c) for at, c in trace.timed(do.StartRollout) if c.engine == "late"]
    assert starts
    assert starts[0][0] >= loaded[0]
    # `Invariants` compared the version of every grant with what the engine really held.
    assert all(c.version >= 7 for _, c in starts)


def test_s63_no_token_is_older_than_the_stamp_of_its_rollout() -> None:
    script = Script(
        plan=lambda r, _t: Plan(((0.0, 0.7), (0.3, 0.7)), reward=float(r.member % 2)),
        load_s=lambda engine, _v: 5.0 if engine == "e0" else 7.0,
    )
    world = World(setup_for(max_steps=8, lag=2), script, engines=2, cap=4, watch=Invariants())
    trace = world.run()
    stamp = {c.rollout: c.version for c in trace.launched}
    for rollout in trace.ended:
        for turn in rollout.turns:
            assert all(version >= stamp[rollout.id] for version, _ in turn.versions)
    loads = trace.timed(do.UpdateWeights)
    done = {(e.engine, e.version): at for at, e in trace.events(on.WeightsLoaded)}
    for began, load in loads:
        ended = done[load.engine, load.version]
        during = [
            c for at, c in trace.timed(do.StartRollout) if began <= at < ended and c.engine == load.engine
        ]
        assert all(c.version < load.version for c in during)


def test_s64_what_a_version_makes_stale_has_stopped_before_an_engine_loads_it() -> None:
    long = {0, 1}
    script = Script(
        seconds=lambda r, _t: 100.0 if r.group in long else 1.0,
        cancel_s=lambda _r: 3.0,
        train_s=lambda _s: 1.0,
        load_s=lambda _e, _v: 2.0,
    )
    setup = setup_for(train_env(group_size=1), batch=2, lag=1, max_staleness=1, max_steps=3)
    trace = World(setup, script, cap=4, rules=alone, watch=Invariants()).run()
    aborted = [(at, c) for at, c in trace.timed(do.CancelRollout) if c.cause == "stale"]
    assert [c.rollout.group for _, c in aborted] == [0, 1]
    stopped = max(at for at, e in trace.events(on.SegmentEnded) if e.rollout.group in long)
    [update] = [at for at, c in trace.timed(do.UpdateWeights) if c.version == 2]
    published = next(at for at, e in trace.events(on.PolicyPublished) if e.version == 2)
    assert aborted[0][0] < published < stopped <= update
    for began, command in trace.timed(do.UpdateWeights):
        ended = next(at for at, e in trace.events(on.WeightsLoaded) if e.version == command.version)
        assert not [at for at, _ in trace.timed(do.GrantTurn) if began < at < ended], (
            "between pause and resume"
        )


def test_s65_a_version_that_vanished_is_passed_over() -> None:
    script = Script(
        reward=alternating,
        load_s=lambda _e, _v: 5.0,
        load_error=lambda _e, version: "no such directory: weights/v1" if version == 1 else None,
    )
    world = World(setup_for(lag=2, max_steps=5), script, cap=8, watch=Invariants())
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert 1 not in {c.version for c in trace.launched}
    tried = [c.version for c in trace.commands(do.UpdateWeights)]
    assert tried[0] == 1
    assert 1 not in tried[1:], "what came meanwhile is loaded instead"
    assert "no such directory" in trace.commands(do.UpdateWeights)[1].reason


def test_s65_when_nothing_newer_comes_the_engine_is_given_up_with_the_cause() -> None:
    script = Script(
        reward=alternating, load_error=lambda _e, version: "no such directory" if version == 1 else None
    )
    world = World(setup_for(lag=0, max_staleness=0), script, cap=4, watch=Invariants())
    with pytest.raises(EngineError, match="no such directory"):
        world.run()
    assert world.core.fleet.held == 0, "the policy's version never read 1"


def test_s66_every_call_is_salted_with_the_version_it_is_sampled_under() -> None:
    script = Script(
        plan=lambda r, _t: Plan(((0.0, 1.0), (1.5, 1.0)), reward=float(r.member)), train_s=lambda _s: 0.5
    )
    world = World(setup_for(lag=1, max_steps=4), script, cap=8, watch=Invariants())
    trace = world.run()
    salts: dict[int, list[int]] = {}
    for grant in trace.commands(do.GrantTurn):
        salts.setdefault(grant.rollout.group, []).append(grant.version)
    assert any(len(set(of_group)) == 2 for of_group in salts.values()), "a group that an update came into"
    assert any({a[-1]} & {b[0]} for a in salts.values() for b in salts.values() if a is not b), (
        "shared by groups"
    )
    # That a grant's version is what the engine holds at that moment is what `Invariants` checks.


def test_s67_weights_that_never_load_end_the_run_after_three_tries() -> None:
    script = Script(reward=alternating, load_error=lambda _e, _v: "CUDA out of memory")
    world = World(setup_for(), script, cap=4, watch=Invariants())
    with pytest.raises(EngineError, match="v1 did not load 3 times, last: CUDA out of memory"):
        world.run()
    assert len(world.trace.commands(do.UpdateWeights)) == 3


def test_s67_of_two_engines_the_one_that_cannot_load_is_taken_out_and_the_run_goes_on() -> None:
    script = Script(reward=alternating, load_error=lambda engine, _v: "disk full" if engine == "e1" else None)
    world = World(setup_for(max_steps=6), script, engines=2, cap=4, watch=Invariants())
    trace = world.run()
    assert trace.finish is not None
    assert len(trace.batches) == 6
    assert world.core.fleet["e1"].out == "v1 did not load 3 times, last: disk full"


def test_turns_wait_at_the_gate_of_an_engine_that_loads_and_go_on_oldest_first() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        if rollout.group == 0:
            return Plan(reward=float(rollout.member))
        number = (
            2 * rollout.group + rollout.member
        )  # the later it started, the sooner it asks for its second turn
        return Plan(((0.0, 1.0), (4.5 - number / 2, 1.0)), reward=float(rollout.member))

    setup = setup_for(batch=2, lag=2, max_staleness=4, max_steps=3)
    trace = World(setup, Script(plan=plan, load_s=lambda _e, _v: 10.0), cap=6, watch=Invariants()).run()
    started = {c.rollout: n for n, c in enumerate(trace.launched)}
    granted = next(
        [started[c.rollout] for c in commands if isinstance(c, do.GrantTurn)]
        for _, event, commands in trace.journal
        if isinstance(event, on.WeightsLoaded)
    )
    assert len(granted) >= 4
    assert granted == sorted(granted)
