"""Cases about how many rollouts run: shedding, converging, floor and ceiling. The numbers are those of the cases."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from paceline.core.admission import AdaptiveCap, Admission, Bounds, Holdings, PredictiveCap
from paceline.core.flights import Flight
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.testing import Invariants, Script, World, setup_for, train_env
from paceline.testing.closed_loop import ClosedLoop, long_answers
from paceline.testing.engine_model import EngineSpeed


class Held:
    """What an engine holds, set by hand."""

    id = "e0"
    calls = 0
    calling_tokens = 0
    working_tokens = 0
    flights: Mapping[RolloutId, Flight] = {}

    def __init__(self, active: int) -> None:
        self.active = active


def load(usage: float, running: int = 1, waiting: int = 0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, kv_usage=usage, preemptions=preemptions)


OVERLOAD = EngineLoad(running=12, waiting=0, kv_usage=1.0, preemptions=0)


class OneCut(Admission):
    """12, until a reading says that memory is full; then 8, and the excess is shed at once."""

    def __init__(self) -> None:
        self.now_at = 12
        self.due = 0

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        if load is not None and load.kv_usage >= 1.0 and self.now_at == 12:
            self.now_at, self.due = 8, engine.active - 8

    def cap(self, engine: EngineId) -> int:
        return self.now_at

    def room(self, engine: EngineId, active: int) -> int:
        return self.now_at - active

    def to_park(self, engine: EngineId, active: int) -> int:
        due, self.due = self.due, 0
        return due

    def reason(self, engine: EngineId) -> str:
        return "memory is full"


@pytest.mark.parametrize("parks", [True, False], ids=["parked", "cancelled"])
def test_s69_exactly_the_youngest_are_shed_and_nothing_is_admitted_until_there_is_room(parks: bool) -> None:
    invariants, most_after, starts_over = Invariants(), [0], []

    def watch(world: World, event: Event, commands: list[Command]) -> None:
        invariants(world, event, commands)
        if world.now > 10:
            active = sum(not f.parked and f.cancelled is None for f in world.core.flights.all())
            most_after[0] = max(most_after[0], active)
        if world.now >= 10:
            running = len(world.running)
            starts_over.extend(
                c for c in commands if isinstance(c, do.StartRollout) and running > 8 and not parks
            )

    setup = setup_for(train_env(group_size=4), batch=64, lag=4, max_steps=3)
    setup = msgspec.structs.replace(setup, park=parks)
    # All start at nought: by start time they tie, so the ids decide; the last four of the third group are youngest.
    script = Script(seconds=lambda r, _t: 30.0 + 5 * r.group + r.member, cancel_s=lambda _r: 0.1)
    world = World(setup, script, admission=OneCut(), watch=watch)
    world.at(10.0, lambda: world.post(on.LoadReported("e0", OVERLOAD)))
    trace = world.run(until=200)

    shed = trace.commands(do.ParkRollout) if parks else trace.commands(do.CancelRollout)[:4]
    assert sorted((c.rollout.group, c.rollout.member) for c in shed) == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert all(c.reason == "memory is full" for c in shed)
    assert most_after[0] <= 8
    assert not starts_over
    ends = {r.id: r for r in trace.ended}
    if parks:
        resumed = [c.rollout for c in trace.commands(do.ResumeRollout)]
        assert resumed == sorted(resumed), "the oldest first"
        back_at = trace.timed(do.ResumeRollout)[0][0]
        fresh = [at for at, c in trace.timed(do.StartRollout) if at > 10]
        assert min(fresh) >= back_at, "a new rollout came before a parked one"
        for command in shed:
            assert ends[command.rollout].outcome.ending == "completed"
            [turn] = ends[command.rollout].turns
            assert (turn.segments, len(turn.sampled_ids)) == (2, 4), "tokens were lost, or sampled again"
    else:
        assert {ends[c.rollout].outcome.cause for c in shed} == {"overload"}
        wasted = world.core.account.of("train", "env")
        assert wasted.tokens["cancelled"] == sum(ends[c.rollout].sampled_tokens for c in shed)
        assert wasted.rollouts["cancelled"] == 4


def converge(admission: Admission) -> ClosedLoop:
    """An engine where a rollout's share of the cache grows evenly from 0.2% to 2% in 100 s, whatever the batch."""
    speed = EngineSpeed(
        kv_tokens=100_000,
        max_model_len=2_000,
        weights_s=100 / 1800,
        overhead_s=0.0,
        seq_s=0.0,
        token_s=0.0,
        kv_s=1e-12,
        attention_s=0.0,
    )
    loop = ClosedLoop(admission, long_answers(1800, 200), speed=speed, group_size=1)
    loop.run(3000)
    return loop


def test_s70_predictive_converges_without_sawing() -> None:
    loop = converge(PredictiveCap(Bounds(initial=4, group=1)))
    after = [s for s in loop.trace.samples if s.at >= 1000]
    caps = [s.cap for s in after]
    assert max(s.usage for s in loop.trace.samples if s.at >= 300) < 0.90
    assert sum(s.usage for s in after) / len(after) > 0.6
    middle = (max(caps) + min(caps)) / 2
    assert max(caps) <= 1.15 * middle
    assert min(caps) >= 0.85 * middle
    assert not loop.trace.cancelled
    assert not [at for at in loop.trace.parked if at >= 300]


@pytest.mark.parametrize("kind", [AdaptiveCap, PredictiveCap])
def test_s71_start_pin_floor_and_ceiling(kind: type[AdaptiveCap] | type[PredictiveCap]) -> None:
    # Two engines of 131,072 tokens with contexts up to 16,384 start with 8 each: 16 in all.
    started = kind(Bounds(floor=1, most=64))
    for name in ("e0", "e1"):
        started.joined(EngineInfo(name, 131_072, 16_384))
    assert started.cap("e0") + started.cap("e1") == 16

    pinned = kind(Bounds(floor=10, most=10))
    pinned.joined(EngineInfo("e0", 131_072, 16_384))
    for n, usage in enumerate((0.0, 1.0, 0.5, 1.0)):
        pinned.observe(Held(10), load(usage, preemptions=5 * n), 5.0 * n)
        assert pinned.cap("e0") == 10

    for floor in (1, 4):
        full = kind(Bounds(floor=floor, most=64, initial=32))
        full.joined(EngineInfo("e0", 131_072, 16_384))
        for n in range(100):
            held = Held(full.cap("e0"))
            full.observe(held, load(1.0, running=held.active, waiting=held.active, preemptions=n), 5.0 * n)
            assert full.to_park("e0", held.active) < held.active
            assert full.cap("e0") >= floor


def test_s71_preemptions_cut_and_a_restart_does_not() -> None:
    admission = AdaptiveCap(Bounds(initial=20))
    admission.observe(Held(20), load(0.5, preemptions=7), 0.0)
    admission.observe(Held(20), load(0.5, preemptions=0), 5.0)
    assert admission.cap("e0") == 20
    admission.observe(Held(20), load(0.5, preemptions=3), 10.0)
    assert admission.cap("e0") == 16
