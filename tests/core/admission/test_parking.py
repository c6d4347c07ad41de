"""Parking, holding and token budgets over random worlds: nothing is lost, whatever a controller does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from paceline.core.admission import AdaptiveCap, Admission, Bounds, Holdings, PredictiveCap
from paceline.core.processing import GroupRules
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineLoad
from paceline.testing import Invariants, Plan, Script, World, chaos, setup_for, train_env


class Moody(Admission):
    """Changes its mind at every reading: any cap, any number to take off, any limit on turns."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.caps: dict[EngineId, int] = {}
        self.off, self.tokens = 0, 10_000

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        self.caps[engine.id] = self.random.randint(1, 8)
        self.off = self.random.choice([0, 0, self.random.randint(0, engine.active)])
        self.tokens = self.random.choice([10_000, 20, 5])

    def cap(self, engine: EngineId) -> int:
        return self.caps.get(engine, 4)

    def room(self, engine: EngineId, active: int) -> int:
        return self.cap(engine) - active

    def turn_tokens(self, engine: EngineId) -> int | None:
        return self.tokens

    def to_park(self, engine: EngineId, active: int) -> int:
        return min(self.off, active)

    def reason(self, engine: EngineId) -> str:
        return "a mood"


KINDS: dict[str, Callable[[int], Admission]] = {
    "moody": Moody,
    "adaptive": lambda _seed: AdaptiveCap(Bounds(initial=4, group=2)),
    "predictive": lambda _seed: PredictiveCap(Bounds(initial=4, group=2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_ends_with_nothing_lost_under_any_controller(seed: int, kind: str) -> None:
    random = Random(seed)
    setup = setup_for(
        train_env("a", group_size=3, max_attempts=2),
        train_env("b", group_size=2),
        batch=6,
        max_steps=6,
        lag=random.randint(0, 3),
        seed=seed,
    )
    setup = msgspec.structs.replace(
        setup, segment_tokens=random.choice([None, 1, 2]), park=random.random() < 0.8, engine_wait_s=100.0
    )
    engines = random.randint(1, 3)
    world = World(
        setup,
        chaos(seed),
        engines=engines,
        admission=KINDS[kind](seed),
        rules=lambda env: GroupRules(env=env, seq_len=64, zero_advantage=False),
        watch=Invariants(),
    )

    def read(name: str) -> None:
        usage = random.random()
        answered = name not in world.lost and random.random() < 0.9
        load = EngineLoad(random.randint(0, 8), random.randint(0, 3), usage, random.randint(0, 9))
        if world.core.fleet[name].out is None:
            world.post(on.LoadReported(name, load if answered else None))
        if world.trace.finish is None:
            world.at(world.now + 1.0, lambda: read(name))

    for n in range(engines):
        world.at(0.5 + 0.1 * n, lambda n=n: read(f"e{n}"))
    if engines > 1 and random.random() < 0.5:
        world.at(random.uniform(2, 20), lambda: world.lose("e0"))
    trace = world.run(until=20_000)
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert len(trace.batches) == 6
    assert not any(e.parked or e.calls or e.in_flight for e in world.core.fleet.engines())


class Narrow(Admission):
    """Room for one call of the contexts below, and no more."""

    def cap(self, engine: EngineId) -> int:
        return 8

    def room(self, engine: EngineId, active: int) -> int:
        return 8 - active

    def turn_tokens(self, engine: EngineId) -> int | None:
        return 3

    def reason(self, engine: EngineId) -> str:
        return "narrow"


def test_when_memory_is_short_turns_wait_and_the_oldest_rollout_goes_first() -> None:
    calls: list[tuple[int, int]] = []
    script = Script(plan=lambda r, _t: Plan(turns=((0.0, 1.0), (0.1, 1.0)), tokens=2))
    world = World(
        setup_for(train_env(group_size=4), batch=64, lag=8),
        script,
        admission=Narrow(),
        watch=lambda w, _e, _c: calls.append((len([r for r in w.running.values() if r.calling]), 0)),
    )
    trace = world.run(until=30)
    assert max(n for n, _ in calls) == 1
    grants = [c.rollout for c in trace.commands(do.GrantTurn)]
    # The first rollout's second turn comes before the first turns of those that started after it.
    first = grants[0]
    again = grants.index(first, 1)
    assert again <= 2
    order = [r.id for r in trace.ended]
    assert order == sorted(order)


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_a_token_budget_cuts_calls_into_segments_and_loses_nothing(budget: int) -> None:
    setup = msgspec.structs.replace(setup_for(train_env(group_size=2), batch=4), segment_tokens=budget)
    script = Script(plan=lambda _r, _t: Plan(turns=((0.0, 1.0),), tokens=6, reward=float(_r.member)))
    world = World(setup, script, watch=Invariants())
    trace = world.run(until=100)
    assert trace.finish is not None
    done = [r for r in trace.ended if r.outcome.ending == "completed"]
    assert {len(r.turns[0].sampled_ids) for r in done} == {6}
    assert {r.turns[0].segments for r in done} == {-(-6 // budget)}
    assert all(c.max_tokens == budget for c in trace.commands(do.GrantTurn))
    assert all(
        len(event.versions) and event.versions[0][1] <= budget
        for _, event in trace.events(on.SegmentEnded)
        if event.versions
    )


def test_a_token_budget_lets_a_call_take_new_weights_in_its_middle() -> None:
    setup = msgspec.structs.replace(setup_for(train_env(group_size=2), batch=2, lag=2), segment_tokens=2)
    script = Script(
        plan=lambda r, _t: Plan(turns=((0.0, 6.0 if r.group else 1.0),), tokens=6, reward=float(r.member))
    )
    trace = World(setup, script, cap=4, watch=Invariants()).run(until=100)
    versions = [v for r in trace.ended for turn in r.turns for v in [turn.versions] if len(v) > 1]
    assert versions, "no turn spans two versions"
