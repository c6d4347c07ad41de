"""A task whose groups always fail whole is not drawn for ever."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from paceline.core.admission import FixedCap
from paceline.core.quarantine import Patience, Quarantine
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.scheduler import Core
from paceline.core.setup import TrainSpec
from paceline.domain import commands as do
from paceline.domain.events import RunOpened
from paceline.domain.group import Fate, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome
from paceline.domain.task import TaskRef
from paceline.testing import Invariants, Plan, Script, Trace, World, setup_for, train_env
from paceline.testing.script import alternating

BROKEN = Outcome("failed", "environment", "KeyError: 'answer' (env.py:7)")


def patient(spec: TrainSpec, groups: int, tasks: int) -> TrainSpec:
    return msgspec.structs.replace(spec, patience=Patience(groups, tasks))


def poisoned(*broken: int, tasks: int = 10, sampler: str = "shuffled", steps: int = 60) -> Trace:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        if task.index in broken:
            return Plan(((0.0, 0.1),), outcome=BROKEN, reward=None)
        return Plan(reward=alternating(rollout, task, 0))

    spec = patient(train_env(tasks=tasks, group_size=2, sampler=sampler), 2, tasks)
    trace = World(
        setup_for(spec, batch=4, max_steps=steps), Script(plan=plan), cap=6, watch=Invariants()
    ).run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    return trace


def drawn(trace: Trace) -> Counter[int]:
    return Counter(c.task.index for c in trace.launched if c.rollout.member == 0)


@pytest.mark.parametrize("sampler", ["shuffled", "sequential"])
def test_a_task_of_which_nothing_can_be_scored_is_drawn_twice_and_then_passed_over(sampler: str) -> None:
    trace = poisoned(3, 7, sampler=sampler)
    counts = drawn(trace)
    assert (counts[3], counts[7]) == (2, 2) or sampler == "shuffled"
    assert max(counts[3], counts[7]) <= 3  # one more group may have been under way
    assert min(count for index, count in counts.items() if index not in (3, 7)) > 10
    told = [note.reason for note in trace.commands(do.NoteQuarantine)]
    assert len(told) == 2
    assert (
        "of env 'env' is not drawn any more: 2 groups in a row failed whole, last: environment: KeyError"
        in told[0]
    )
    assert len(trace.commands(do.SkipTask)) > 10


def test_the_others_are_drawn_in_the_order_that_they_would_have_come_in() -> None:
    with_it = [t for t in order(poisoned(3)) if t.index != 3]
    without = [t for t in order(poisoned()) if t.index != 3]
    both = min(len(with_it), len(without))
    assert with_it[:both] == without[:both]


def order(trace: Trace) -> list[TaskRef]:
    return [c.task for c in trace.launched if c.rollout.member == 0]


def test_an_environment_that_is_broken_keeps_its_tasks() -> None:
    trace = poisoned(*range(7), steps=30)
    held = {note.index for note in trace.commands(do.NoteQuarantine)}
    assert len(held) == 5  # never more than half of them


def result(fate: Fate) -> GroupResult:
    return GroupResult(0, tuple(Verdict(RolloutId(0, n), fate, "why") for n in range(2)), None, None, None)


def test_failures_count_only_while_the_environment_works_for_others() -> None:
    quarantine = Quarantine({"env": Patience(2, 100)})
    bad, good = TaskRef("env", "train", 1), TaskRef("env", "train", 2)
    for _ in range(5):
        assert quarantine.closed(bad, result("failed")) is None  # nothing has worked yet
    quarantine.closed(good, result("queued"))
    assert quarantine.closed(bad, result("failed")) is None
    for _ in range(5):
        assert quarantine.closed(bad, result("failed")) is None  # all of one outage
    quarantine.closed(good, result("zero_signal"))
    assert quarantine.closed(bad, result("failed")) is not None
    assert quarantine.holds(bad)


def test_a_group_of_which_no_member_was_started_says_nothing_of_its_task() -> None:
    quarantine = Quarantine({"env": Patience(2, 100)})
    task, good = TaskRef("env", "train", 1), TaskRef("env", "train", 2)
    quarantine.closed(good, result("queued"))
    quarantine.closed(task, GroupResult(0, (), None, None, "cancelled"))
    quarantine.closed(good, result("queued"))
    assert quarantine.closed(task, result("failed")) is None


def test_a_group_that_is_void_for_one_member_has_not_failed_whole() -> None:
    quarantine = Quarantine({"env": Patience(2, 100)})
    task, good = TaskRef("env", "train", 1), TaskRef("env", "train", 2)
    fates: tuple[Fate, ...] = ("failed", "void")
    void = GroupResult(0, tuple(Verdict(RolloutId(0, n), fate, "why") for n, fate in enumerate(fates)))
    for _ in range(4):
        quarantine.closed(good, result("queued"))
        assert quarantine.closed(task, void) is None
    assert not quarantine.holds(task)


def test_a_task_that_worked_begins_anew() -> None:
    quarantine = Quarantine({"env": Patience(2, 100)})
    task, good = TaskRef("env", "train", 1), TaskRef("env", "train", 2)
    for fate in ("failed", "queued", "failed", "truncated", "failed"):
        quarantine.closed(good, result("queued"))
        assert quarantine.closed(task, result(fate)) is None
    assert not quarantine.holds(task)


def test_what_is_held_and_what_was_counted_survive_a_resume() -> None:
    quarantine = Quarantine({"env": Patience(2, 100)})
    quarantine.closed(TaskRef("env", "train", 2), result("queued"))
    quarantine.closed(TaskRef("env", "train", 1), result("failed"))
    quarantine.hold("env", 5)
    again = Quarantine({"env": Patience(2, 100)})
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(quarantine.snapshot())), "env")
    assert again.holds(TaskRef("env", "train", 5))
    again.closed(TaskRef("env", "train", 2), result("queued"))
    assert again.closed(TaskRef("env", "train", 1), result("failed")) is not None


def test_what_was_held_is_drawn_again_when_somebody_says_so_and_stays_so() -> None:
    spec = patient(train_env(tasks=10, group_size=2, sampler="sequential"), 2, 10)
    setup = setup_for(spec, batch=4, max_steps=30)

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        if task.index == 3:
            return Plan(((0.0, 0.1),), outcome=BROKEN, reward=None)
        return Plan(reward=alternating(rollout, task, 0))

    world = World(setup, Script(plan=plan), cap=6)
    world.run(events=1500)
    assert world.core.curriculum.quarantine.holds(TaskRef("env", "train", 3))
    recovery = Recovery(EMPTY)
    for seq, (at, event, commands) in enumerate(world.trace.journal):
        recovery.apply(seq, at, event, commands)
    recovery.apply(recovery.seq, world.now, RunOpened("run", 0, recovered=True, forgives=("env",)), ())
    rollouts = {rollout.id: rollout for rollout in world.trace.ended}
    assert recovery.state(rollouts, {})["curriculum"]["quarantine"]["held"] == {}

    core = Core(setup, FixedCap(6))
    core.restore(world.core.snapshot(), world.core.cut)
    assert core.curriculum.quarantine.holds(TaskRef("env", "train", 3))
    core.handle(RunOpened("run", 0, forgives=("env",)), 0.0)
    assert not core.curriculum.quarantine.holds(TaskRef("env", "train", 3))
