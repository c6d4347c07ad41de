"""Which engines there are, which version each holds, and where a rollout goes."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.admission import FixedCap
from paceline.core.fleet import SILENT_READINGS, EngineState, Fleet
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.events import EngineJoined, WeightsLoaded
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.errors import InvariantError
from paceline.testing import Script, World, setup_for


def fleet_of(*versions: int, cap: int = 4) -> Fleet:
    fleet = Fleet(FixedCap(cap))
    for number, version in enumerate(versions):
        join(fleet, f"e{number}", version)
    return fleet


def join(fleet: Fleet, engine: str, version: int) -> EngineState:
    return fleet.joined(EngineJoined(EngineInfo(engine, None, None), version), catch_up=fleet.held)


def publish(fleet: Fleet, version: int) -> list[str]:
    fleet.newest = version
    for engine in (begun := fleet.to_update()):
        engine.loading = version
    return [engine.id for engine in begun]


def test_rollouts_spread_over_the_engines_with_most_room_and_groups_stay_together() -> None:
    fleet, placed = fleet_of(0, 0), []
    for _ in range(6):
        engine = fleet.place(None)
        assert engine is not None
        engine.in_flight += 1
        engine.touch()
        placed.append(engine.id)
    assert placed == ["e0", "e1"] * 3
    preferred = fleet.place("e1")
    assert preferred is not None
    assert preferred.id == "e1"
    fleet["e1"].in_flight = 4
    fleet["e1"].touch()
    other = fleet.place("e1")
    assert other is not None
    assert other.id == "e0", "over the cap of the preferred one, another takes it"
    fleet["e0"].in_flight = 4
    fleet["e0"].touch()
    assert fleet.place("e1") is None
    assert fleet.free() == 0


def test_the_version_to_count_on_is_the_oldest_that_a_usable_engine_holds() -> None:
    fleet = fleet_of(0, 0)
    assert publish(fleet, 1) == ["e0", "e1"]
    assert fleet.loaded(WeightsLoaded("e0", 1, 0.0))
    assert fleet.held == 0
    assert fleet.gate_open(fleet["e0"])
    assert not fleet.gate_open(fleet["e1"])
    assert fleet.loaded(WeightsLoaded("e1", 1, 0.0))
    assert fleet.held == 1
    publish(fleet, 2)
    fleet.loaded(WeightsLoaded("e0", 2, 0.0))
    fleet.taken_out(fleet["e1"], "gone")
    assert fleet.held == 2, "one that is out holds nothing up"


def test_a_failed_load_changes_nothing_and_is_tried_again() -> None:
    fleet = fleet_of(0)
    publish(fleet, 1)
    assert not fleet.loaded(WeightsLoaded("e0", 1, 0.0, error="disk full"))
    assert (fleet.held, fleet["e0"].attempts) == (0, 1)
    assert [engine.id for engine in fleet.to_update()] == ["e0"]


def test_no_engine_loads_while_calls_of_cancelled_rollouts_run_on_it() -> None:
    fleet = fleet_of(0)
    fleet["e0"].calls_to_stop = 1
    assert publish(fleet, 1) == []
    assert not fleet.gate_open(fleet["e0"]), "nor does it take new calls under weights that are about to go"
    fleet["e0"].calls_to_stop = 0
    assert publish(fleet, 1) == ["e0"]


def test_a_newcomer_with_older_weights_is_not_used_until_it_has_loaded() -> None:
    fleet = fleet_of(0)
    publish(fleet, 7)
    fleet.loaded(WeightsLoaded("e0", 7, 0.0))
    late = join(fleet, "late", 0)
    assert not late.usable
    assert (fleet.held, fleet.cap()) == (7, 4)
    assert publish(fleet, 7) == ["late"]
    fleet.loaded(WeightsLoaded("late", 7, 0.0))
    assert late.usable
    assert fleet.cap() == 8


def test_the_answer_to_an_update_from_before_an_engine_was_lost_says_nothing() -> None:
    fleet = fleet_of(0, 0)
    publish(fleet, 1)
    fleet.taken_out(fleet["e1"], "gone")
    back = join(fleet, "e1", 0)
    assert publish(fleet, 1) == [], "not before that answer is there"
    assert not fleet.loaded(WeightsLoaded("e1", 1, 0.0))
    assert back.held == 0
    assert publish(fleet, 1) == ["e1"]


def test_answers_that_nobody_asked_for_are_our_own_bug() -> None:
    fleet = fleet_of(0)
    with pytest.raises(InvariantError, match="was loading nothing"):
        fleet.loaded(WeightsLoaded("e0", 1, 0.0))
    with pytest.raises(InvariantError, match="joined twice"):
        join(fleet, "e0", 0)
    with pytest.raises(InvariantError, match="'e9' never joined; known: \\['e0'\\]"):
        fleet["e9"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "load", "fail", "lose", "join"]), st.integers(0, 2)),
        max_size=60,
    )
)
def test_what_to_count_on_never_falls_and_is_never_newer_than_published(steps: list[tuple[str, int]]) -> None:
    fleet, newest, before = fleet_of(0, 0, 0), 0, 0
    pending: list[WeightsLoaded] = []
    for what, number in steps:
        engine = fleet[f"e{number}"]
        if what == "publish":
            newest += 1
            pending += [WeightsLoaded(e, newest, 0.0) for e in publish(fleet, newest)]
        elif what in ("load", "fail") and pending:
            answer = pending.pop(0)
            fleet.loaded(WeightsLoaded(answer.engine, answer.version, 0.0, None if what == "load" else "no"))
        elif (
            what == "lose"
            and engine.out is None
            and sum(e.usable for e in fleet.engines()) > 1
            and engine.usable
        ):
            fleet.taken_out(engine, "gone")
        elif what == "join" and engine.out is not None:
            join(fleet, engine.id, 0)
        pending += [WeightsLoaded(e, newest, 0.0) for e in publish(fleet, newest)]
        assert before <= fleet.held <= newest
        before = fleet.held


def test_an_engine_that_falls_silent_is_taken_out_and_asked_to_come_back() -> None:
    world = World(setup_for(), Script(seconds=lambda _r, _t: 1e6))
    world.post(on.LoadReported("e0", EngineLoad(0, 0, 0.0, 0)))
    for _ in range(SILENT_READINGS - 1):
        world.post(on.LoadReported("e0", None))
    assert not world.trace.commands(do.ReviveEngine)
    world.post(on.LoadReported("e0", None))
    assert "not answered" in world.trace.commands(do.ReviveEngine)[0].reason


def test_an_engine_that_has_no_metrics_is_not_taken_for_silent() -> None:
    world = World(setup_for(), Script(seconds=lambda _r, _t: 1e6))
    for _ in range(3 * SILENT_READINGS):
        world.post(on.LoadReported("e0", None))
    assert not world.trace.commands(do.ReviveEngine)


def test_an_engine_that_is_taken_out_finishes_its_calls_and_is_not_got_back() -> None:
    world = World(setup_for(batch=8, max_steps=3), Script(seconds=lambda *_: 2.0), cap=4, engines=2)
    world.run(until=1.0)
    calls = [r for r in world.running.values() if r.calling is not None and r.calling[0] == "e0"]
    assert calls
    world.post(on.EngineLost("e0", "somebody took it out", leaves=True))
    state = world.core.fleet["e0"]
    assert state.calls == len(calls), "they go on"
    trace = world.run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert not [r for r in trace.ended if r.outcome.ending == "failed"]
    assert (state.calls, state.in_flight) == (0, 0)
    assert not trace.commands(do.ReviveEngine)
    assert {c.engine for at, c in trace.timed(do.StartRollout) if at > 1.0} == {"e1"}


def test_an_engine_that_is_lost_and_then_taken_out_stays_out() -> None:
    world = World(
        setup_for(batch=8, max_steps=3),
        Script(seconds=lambda *_: 2.0, revive_s=lambda _: inf),
        cap=4,
        engines=2,
    )
    world.run(until=1.0)
    world.lose("e0")
    world.post(on.EngineLost("e0", "somebody took it out", leaves=True))
    assert world.core.fleet["e0"].out == "somebody took it out"
    finish = world.run().finish
    assert finish is not None
    assert finish.status == "done"


def test_an_engine_that_hangs_while_it_loads_is_taken_out_at_once_and_got_back() -> None:
    world = World(setup_for(batch=4, max_steps=2), Script(seconds=lambda *_: 1.0), cap=4, engines=2)
    world.run(until=0.5)
    world.core.fleet.newest = 1
    world.core.fleet["e0"].loading = 1
    world.post(WeightsLoaded("e0", 1, 120.0, "v1 was not in within 120 s", is_outage=True))
    assert world.core.fleet["e0"].out == "v1 was not in within 120 s"
    assert [c.engine for c in world.trace.commands(do.ReviveEngine)] == ["e0"]
    assert not world.trace.commands(do.UpdateWeights), "it is not asked to do the same again"
