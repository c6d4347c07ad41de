"""What defines `divided` and `kv_area`: who comes first, who gives way, and where rollouts go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from policies import Kind, setup_of

from paceline.core.groups import OpenGroup
from paceline.core.scheduling import Divided, KvArea, Scheduling
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.domain.load import EngineInfo
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, Plan, Script, World, alternating, train_env


class Sized(World):
    """Engines that tell their KV capacity."""

    kv_tokens = 100

    def join(self, engine: EngineId, version: Version) -> None:
        self.held[engine] = version
        self.post(on.EngineJoined(EngineInfo(engine, self.kv_tokens, None), version))


def run(
    policy: Scheduling,
    tokens: Callable[[RolloutId], int],
    *,
    kind: type[World] = World,
    watch: Callable[[World], None] | None = None,
    **more: Any,
) -> World:
    invariants = Invariants()

    def look(world: World, event: Event, commands: list[Command]) -> None:
        invariants(world, event, commands)
        if watch is not None:
            watch(world)

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        n = tokens(rollout)
        return Plan(((0.0, float(n)),), n, reward=alternating(rollout, task, 0))

    setup = setup_of(
        Kind(lambda: policy, max_staleness=4),
        envs=(train_env(group_size=4),),
        batch=16,
        max_steps=more.pop("steps", 2),
        seq_len=512,
    )
    world = kind(setup, Script(plan=plan), scheduling=policy, watch=look, **more)
    trace = world.run(events=200_000)
    assert trace.finish is not None
    assert trace.finish.status == "done"
    return world


def first_grants(world: World) -> list[RolloutId]:
    """Rollouts in the order of their first requests."""
    grants = [c.rollout for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.GrantTurn)]
    return list(dict.fromkeys(grants))


def test_the_first_of_each_group_is_a_probe_and_comes_first() -> None:
    world = run(Divided(8, 0.25), lambda r: 8, cap=2, steps=1)
    assert [(r.group, r.member) for r in first_grants(world)[:4]] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_then_the_group_with_the_longest_probe_comes_first() -> None:
    length = {0: 4, 1: 16, 2: 8, 3: 12}
    world = run(Divided(64, 0.25), lambda r: length[r.group % 4], cap=1, steps=1)
    groups = [r.group for r in first_grants(world)]
    assert groups[:4] == [0, 1, 2, 3]
    assert list(dict.fromkeys(groups[4:])) == [1, 3, 2, 0]


def test_without_an_order_groups_come_as_they_were_drawn_and_nobody_gives_way() -> None:
    policy = Divided(4, 0.25, "arrival")
    world = run(policy, lambda r: 20 if r == (0, 0, 0) else 4 + r.group % 3, cap=1, steps=1)
    began = [(r.group, r.member) for r in first_grants(world)]
    assert began == sorted(began)
    assert not world.trace.parked
    assert policy.estimates == {}


def test_at_a_chunks_end_a_rollout_gives_way_to_one_that_comes_before_it() -> None:
    # The probe of group 0 is long: at its chunk's end the others, which have sampled nothing, come first.
    world = run(Divided(4, 0.25), lambda r: 20 if r == (0, 0, 0) else 4, cap=1, steps=1)
    parked = [c.rollout for c in world.trace.parked]
    assert parked
    assert parked[0] == (0, 0, 0)
    grants = [c.rollout for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.GrantTurn)]
    assert grants[:4] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]


def test_every_request_is_a_chunk() -> None:
    world = run(Divided(4, 0.25), lambda r: 11, cap=8)
    grants = [c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.GrantTurn)]
    assert {g.max_tokens for g in grants} == {4}
    assert {t.segments for r in world.trace.ended if r.outcome.ending == "completed" for t in r.turns} == {3}


@pytest.mark.parametrize(
    "policy",
    [Divided(8, 0.25), Divided(8, 0.25, "arrival"), KvArea(8, 0.25, 0.9, 0.75)],
    ids=["divided", "arrival", "kv_area"],
)
def test_no_engine_is_given_more_than_its_kv_cache_holds(policy: Scheduling) -> None:
    most = 0

    def watch(world: World) -> None:
        nonlocal most
        for engine in world.core.fleet.engines():
            # The longest is 40 tokens: what is expected may be wrong by that much, a chunk at a time.
            held = sum(f.context for f in engine.flights.values() if not f.parked)
            most = max(most, held)
            assert held <= Sized.kv_tokens + 50

    world = run(policy, lambda r: 40 if r.group % 3 == 0 else 10, kind=Sized, cap=64, engines=2, watch=watch)
    assert most > 60
    assert len(world.trace.batches) == 2


def test_a_long_rollout_moves_to_an_engine_that_has_become_empty() -> None:
    # Six long ones on engine 0's groups and short ones elsewhere: when these are done, their engine has room.
    world = run(
        Divided(4, 0.2), lambda r: 40 if r.group % 2 == 0 else 4, kind=Sized, cap=64, engines=2, steps=1
    )
    engines: dict[RolloutId, set[str]] = {}
    for _, _, commands in world.trace.journal:
        for command in commands:
            if isinstance(command, do.GrantTurn):
                engines.setdefault(command.rollout, set()).add(command.engine)
    assert any(len(on) > 1 for on in engines.values())


# ── kv_area ──


def test_once_lengths_are_known_the_critical_go_first_and_then_the_shortest() -> None:
    policy = KvArea(64, 0.25, 0.9, 0.75)
    lengths = policy.lengths.of("env")
    of = {1: 8, 2: 16, 3: 64, 4: 200}
    for group, tokens in of.items():
        for member in range(12):
            lengths.end(group, member, tokens + member % 3, is_runaway=False)
    groups = {g: OpenGroup(g, TaskRef("env", "train", g), 16, 0) for g in of}
    policy.steps_left = 150.0  # steps that everything together will take
    ranked = sorted(groups, key=lambda g: policy.rank(groups[g], None))
    assert ranked == [4, 1, 2, 3]  # as long as all the rest: first; then from the shortest on
    policy.steps_left = 1000.0
    assert sorted(groups, key=lambda g: policy.rank(groups[g], None)) == [1, 2, 3, 4]
    remaining = policy.remaining(groups[4], 0)
    assert remaining == pytest.approx(200, rel=0.2)


def test_lengths_that_were_learnt_are_told_to_the_journal() -> None:
    policy = KvArea(16, 0.25, 0.9, 0.75)
    world = run(policy, lambda r: 10 + r.member, cap=8, steps=3)
    notes = [c for _, _, cs in world.trace.journal for c in cs if isinstance(c, do.NoteLengths)]
    assert [note.ended for note in notes] == [16, 32, 48]
    assert notes[-1].judged > 0
    assert notes[-1].mean_rank is not None
