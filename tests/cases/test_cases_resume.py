"""Cases about going on from a checkpoint, and about what a long run holds in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from paceline.core.curriculum import Curriculum, Source
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, Plan, Script, World, alternating, setup_for, train_env


def test_s52_after_a_kill_each_task_of_the_epoch_is_trained_exactly_once() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        return Plan(((0.0, 1.0 + task.index % 7),), reward=float(rollout.member))

    env = train_env(tasks=100, epochs=1, sampler="shuffled")
    setup = setup_for(env, batch=8, lag=2, max_steps=1000, checkpoint_every=7, seed=5)
    whole = World(setup, Script(plan=plan), cap=16, watch=Invariants()).run()
    first = World(setup, Script(plan=plan), cap=16, watch=Invariants())
    while not first.trace.checkpoints:
        first.run(events=1)
    step, state = first.trace.checkpoints[0]
    trained = [
        t
        for batch in first.trace.batches
        if batch.step <= step
        for t in (s.task_index for s in batch.samples)
    ]
    drawn = len({c.rollout.group for c in first.trace.launched})
    assert drawn > len(set(trained)), "some are drawn and not trained"

    second = World(setup, Script(plan=plan), cap=16, state=state, watch=Invariants()).run()
    again = [s.task_index for batch in second.batches for s in batch.samples]
    assert sorted(trained + again) == sorted(2 * list(range(100))), "both members of each task, once"

    def order(trace: Any) -> list[int]:
        return list(dict.fromkeys(c.task.index for c in trace.launched))

    redrawn = [group["task"][2] for group in (*state["groups"], *state["processing"])]
    assert redrawn
    assert order(second)[: len(redrawn)] == redrawn
    assert order(second)[len(redrawn) :] == order(whole)[state["curriculum"]["envs"]["env"]["drawn"] :]


def test_s52_what_a_stop_cut_short_is_drawn_again() -> None:
    setup = setup_for(train_env(tasks=20, epochs=1), max_steps=100)
    first = World(setup, Script(reward=alternating, seconds=lambda _r, _t: 3.0), cap=6, watch=Invariants())
    first.at(7.0, first.shut_down)
    first.run()
    assert first.trace.finish is not None
    assert first.trace.finish.status == "stopped"
    state = first.trace.checkpoints[-1][1]
    assert state["curriculum"]["envs"]["env"]["redraw"], "some were under way"
    second = World(setup, Script(reward=alternating), cap=6, state=state, watch=Invariants())
    second.run()
    groups = {**first.trace.shipped_groups(), **second.trace.shipped_groups()}
    assert sorted(task for _, task in groups.values()) == list(range(20))


def draw_all(curriculum: Curriculum, count: int) -> list[tuple[str, int]]:
    drawn = (curriculum.draw(lambda _env: True) for _ in range(count))
    return [(task.env, task.index) for task in drawn if task is not None]


def test_s55_a_position_is_only_good_for_the_tasks_it_was_made_on() -> None:
    a = Source("a", 100, fingerprint="x")
    before = Curriculum([a], seed=1)
    draw_all(before, 50)
    state = before.snapshot([])

    other = replaced(a, size=40, fingerprint="y")
    for changed, word in ((other, "'a'"), (replaced(a, env="b"), "'a'")):
        after = Curriculum([changed], seed=1)
        [warning] = after.restore(state)
        assert word in warning
        assert next(iter(after.samplers.values())).drawn == 0
        assert len(draw_all(after, 60)) == 60

    added = Curriculum([a, Source("new", 10, fingerprint="z")], seed=1)
    assert added.restore(state) == []
    assert {env: sampler.drawn for env, sampler in added.samplers.items()} == {"a": 50, "new": 0}


def replaced(source: Source, **changes: Any) -> Source:
    return msgspec.structs.replace(source, **changes)


def test_s51_the_core_does_not_grow_over_a_thousand_steps() -> None:
    setup = setup_for(batch=8, max_steps=1000, dead_group_limit=10_000)
    world = World(setup, replace(Script(), reward=alternating), cap=8)
    most = {}
    for step in (200, 950):
        while world.core.cut < step:
            world.run(events=100)
        # The most over some batches: what is in flight at one moment differs from the next.
        most[step] = max(held_by(world.core) for _ in range(200) if world.run(events=2))
    assert world.core.cut >= 950
    assert abs(most[950] - most[200]) <= 20, f"less than one rollout's objects: {most}"


def held_by(root: Any) -> int:
    """Objects that can be reached from here: records, and the entries of dicts, lists and sets."""
    seen: set[int] = set()
    todo, count = [root], 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, str | int | float | bool | type | None):
            continue
        seen.add(id(value))
        count += 1
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
            count += len(value)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            todo += list(value)
            count += len(value)
        elif isinstance(value, np.ndarray):
            continue
        elif type(value).__module__.startswith("paceline") and not callable(value):
            names = [n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())]
            names += list(getattr(type(value), "__struct_fields__", ())) + list(
                getattr(value, "__dict__", {})
            )
            todo += [getattr(value, name) for name in names if hasattr(value, name)]
    return count
