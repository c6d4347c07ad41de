"""Lines give who comes first as if all that wait were ranked anew each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies import Kind, setup_of

from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling import Divided, KvArea
from paceline.core.scheduling.kv_area import _LOOK
from paceline.core.scheduling.line import Line, Lines, Name
from paceline.core.scheduling.ordered import Ordered
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.domain.load import EngineInfo
from paceline.testing import Invariants, World, chaos, train_env

_names = st.integers(0, 7)
_ranks = st.integers(0, 3).map(float)


@given(st.lists(st.one_of(st.tuples(_names, _ranks), _names), max_size=60), st.integers(1, 4))
def test_a_line_is_the_sorted_list_of_who_waits(changes: list[tuple[int, float] | int], count: int) -> None:
    line = Line()
    waits: dict[Name, tuple[Any, Any]] = {}
    for change in changes:
        if isinstance(change, tuple):
            name, rank = change
            waits[name] = (rank, 0.0), (name, 0, 0)
            line.put(name, waits[name])
        else:
            line.drop(change)
            waits.pop(change, None)
        gone = {name for name in waits if len(waits) > 6 and isinstance(name, int) and name % 3 == 0}
        found = line.firsts(count, lambda name, gone=gone: name not in gone)
        expected = sorted((key, name) for name, key in waits.items() if name not in gone)[:count]
        assert found == expected
        for name in gone:  # whom a look has passed over, a later one may
            line.put(name, waits[name])


def test_an_environment_that_may_not_start_anything_is_passed_by() -> None:
    lines = Lines()
    for number, env in enumerate("aabb"):
        lines.of(env).put(number, ((0.0, float(number)), (number, 0, 0)))
    lines.of(None).put(RolloutId(9, 0), ((0.0, 2.5), RolloutId(9, 0)))

    def firsts(*stopped: str) -> list[Name]:
        found = lines.firsts(3, lambda name: True, lambda env: env not in stopped)
        return [name for _, name in found]

    assert firsts() == [0, 1, 2]
    assert firsts("a") == [2, (9, 0, 0), 3]
    assert firsts("a", "b") == [(9, 0, 0)]
    assert firsts() == [0, 1, 2]


def waiting(policy: Ordered) -> list[tuple[Any, Any, OpenGroup, Flight | None]]:
    """All that wait, ranked anew, best first: what lines are there to save."""
    desk = policy.desk
    found: list[tuple[Any, Any, OpenGroup, Flight | None]] = [
        (policy.rank(group, None), (group.id, group.launched, 0), group, None)
        for group in desk.groups.groups()
        if group.task.split == "train" and group.owes_launches and desk.may_start(group.task.env)
    ]
    for flight in policy._standing.values():
        if flight.cancelled is None:
            group = desk.groups.of(flight.id)
            found.append((policy.rank(group, flight), flight.id, group, flight))
    return sorted(found, key=lambda each: each[:2])


class Compared(Ordered):
    """Compares each choice with all that wait."""

    compared = 0
    passed = 0

    def candidates(self) -> Iterable[tuple[OpenGroup, Flight | None]]:
        found = list(super().candidates())
        ranked = waiting(self)
        if isinstance(self, Divided):
            ranked = ranked[:1]
        else:
            critical = [each for each in ranked if each[0][0] == 0.0]
            shortest = sorted(
                ranked, key=lambda each: (self.keys(*each[2:], self._needs(*each[2:])[1])[0], each[1])
            )
            others = [each for each in shortest[:_LOOK] if each[0][0] == 1.0]
            self.passed += bool(critical)
            ranked = critical[:_LOOK] + others
        assert found == [(group, flight) for _, _, group, flight in ranked]
        self.compared += bool(ranked)
        return found


class ComparedDivided(Compared, Divided):
    pass


class ComparedKvArea(Compared, KvArea):
    def candidates(self) -> Iterable[tuple[OpenGroup, Flight | None]]:
        found = super().candidates()
        # Sums that are kept, against sums over all.
        area = sum(s.remaining * (s.context + s.remaining / 2) for s in self._seats.values())
        to_come = 0.0
        for group in self._open.values():
            members, rest = group.unlaunched + len(group.retries), self.remaining(group, 0)
            to_come += members * rest
            area += members * rest * rest / 2
        for flight in self._standing.values():
            rest = self.remaining(self.desk.groups.of(flight.id), flight.sampled)
            area += rest * (flight.context + rest / 2)
        assert (self._to_come, self._area) == pytest.approx((to_come, area), rel=1e-6, abs=1e-3)
        return found


class Small(World):
    """Engines that tell a small KV capacity."""

    def join(self, engine: EngineId, version: Version) -> None:
        self.held[engine] = version
        self.post(on.EngineJoined(EngineInfo(engine, 40, None), version))


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("kind", [ComparedDivided, ComparedKvArea])
def test_who_is_chosen_comes_first_of_all_that_wait(kind: type[Any], seed: int) -> None:
    policy = kind(2, 0.1) if kind is ComparedDivided else kind(2, 0.1, 0.5, 0.75)
    setup = setup_of(
        Kind(lambda: policy, lag=1, max_staleness=2),
        envs=(
            train_env("a", group_size=2 + seed % 4, max_attempts=3),
            train_env("b", group_size=3, tasks_per_minute=120.0 if seed % 2 else None, weight=0.5),
        ),
        batch=12,
        max_steps=3,
        seed=seed,
        seq_len=512,
    )
    kind_of_world = Small if seed % 3 else World
    world = kind_of_world(
        setup, chaos(seed), engines=1 + seed % 3, cap=4 + seed % 5, scheduling=policy, watch=Invariants()
    )
    trace = world.run(events=60_000)
    assert trace.finish is not None
    assert policy.compared > 40
    assert any(isinstance(c, do.ParkRollout) for _, _, cs in trace.journal for c in cs) or seed % 3 == 0
    if kind is ComparedKvArea and seed % 3:
        assert policy.passed
