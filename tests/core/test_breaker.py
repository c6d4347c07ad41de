"""An environment that is out costs a few attempts, and not every task that is drawn meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from paceline.core.breaker import FAILURES, FIRST_S, LONGEST_S
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome
from paceline.domain.task import TaskRef
from paceline.errors import NoProgressError
from paceline.testing import Invariants, Plan, Script, Trace, World, setup_for, train_env
from paceline.testing.script import alternating

DOWN = Outcome("failed", "infrastructure", "the sandbox provider answers 503")


def outage(
    setup: CoreSetup, begins: float, ends: float, env: str = "sandbox", *, cap: int = 8
) -> tuple[World, Callable[[], Trace]]:
    """A world in which every rollout of `env` that starts in that time fails after a tenth of a second."""
    made: list[World] = []

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        now = made[0].now if made else 0.0  # it begins to start some while it is made
        if task.env == env and begins <= now < ends:
            return Plan(((0.0, 0.1),), outcome=DOWN, reward=None)
        return Plan(reward=alternating(rollout, task, 0))

    invariants = Invariants()
    made.append(World(setup, Script(plan=plan), cap=cap, watch=invariants))
    return made[0], made[0].run


def notes(trace: Trace) -> list[tuple[float, do.NoteOutage]]:
    return [(at, c) for at, _, commands in trace.journal for c in commands if isinstance(c, do.NoteOutage)]


def test_during_an_outage_one_rollout_at_a_time_looks_whether_it_is_over() -> None:
    setup = setup_for(train_env("sandbox", group_size=4, max_attempts=2), batch=8, max_steps=60)
    _, run = outage(setup, 20.0, 140.0)
    trace = run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    told = notes(trace)
    [closed] = [(at, note) for at, note in told if not note.out]
    assert 140.0 <= closed[0] < 140.0 + 2 * 128.0 + 2.0  # not more than the next pause later
    assert "is back after" in closed[1].reason
    opened = told[0]
    assert opened[1].reason == (
        f"env 'sandbox' is out: {FAILURES} rollouts in a row failed, last: the sandbox provider answers 503; the next "
        f"is tried in {FIRST_S:g} s"
    )
    starts = [
        at
        for at, _, commands in trace.journal
        for c in commands
        if isinstance(c, do.StartRollout) and opened[0] < at < 140.0
    ]
    pauses = [b - a for a, b in pairwise(starts)]
    assert pauses == pytest.approx([2.0**n + 0.1 for n in range(1, len(pauses) + 1)])
    # 120 s at a tenth of a second each, 8 at once, would have been almost ten thousand. Those that were begun before it
    # was known, and the probes:
    failed = [r for r in trace.ended if r.outcome == DOWN]
    assert len(failed) <= 2 * 8 + len(starts)


def test_other_environments_go_on_meanwhile() -> None:
    envs = train_env("sandbox", group_size=4), train_env("other", group_size=4)
    _, run = outage(setup_for(*envs, batch=8, max_steps=40), 20.0, 1e9)
    trace = run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    late = Counter(c.task.env for at, c in launches(trace) if at > 30.0)
    assert late["other"] > 100
    assert late["sandbox"] < 10


def launches(trace: Trace) -> list[tuple[float, do.StartRollout]]:
    return [(at, c) for at, _, commands in trace.journal for c in commands if isinstance(c, do.StartRollout)]


def test_when_all_are_out_for_too_long_the_run_ends_with_the_cause() -> None:
    setup = setup_for(train_env("sandbox", group_size=4), batch=8, max_steps=60)
    world, run = outage(msgspec.structs.replace(setup, outage_s=600.0), 20.0, 1e9)
    with pytest.raises(NoProgressError) as end:
        run()
    assert "longer than run.outage_s 600: env 'sandbox': the sandbox provider answers 503" in str(end.value)
    assert world.now < 20.0 + 600.0 + LONGEST_S + 60.0


def test_the_run_ends_too_when_all_others_have_run_out_of_tasks() -> None:
    done = train_env("done", tasks=4, epochs=1, group_size=2)
    setup = setup_for(train_env("sandbox", group_size=4), done, batch=8, max_steps=60)
    world, run = outage(msgspec.structs.replace(setup, outage_s=600.0), 20.0, 1e9)
    with pytest.raises(NoProgressError, match=r"longer than run\.outage_s 600"):
        run()
    assert world.core.curriculum.samplers["done"].exhausted
    assert world.now < 20.0 + 600.0 + LONGEST_S + 60.0


def test_the_run_goes_on_while_another_has_members_to_start_though_no_tasks_and_none_under_way() -> None:
    slow = train_env("slow", tasks=2, epochs=1, group_size=4, tasks_per_minute=6.0)
    setup = setup_for(train_env("sandbox", group_size=4), slow, batch=8, max_steps=60)
    world, run = outage(msgspec.structs.replace(setup, outage_s=20.0), 0.0, 1e9)
    with pytest.raises(NoProgressError, match=r"longer than run\.outage_s 20"):
        run()
    slow_starts = [at for at, c in launches(world.trace) if c.task.env == "slow"]
    assert len(slow_starts) == 8, "one each ten seconds"
    assert world.now > slow_starts[-1]


def continued(setup: CoreSetup, plan: Callable[[RolloutId, TaskRef], Plan]) -> Trace:
    """A life that goes on with twelve rollouts of the one before, all of which had heard no answer."""
    long = World(setup, Script(plan=lambda _rollout, _task: Plan(((0.0, 1e6),))), cap=12)
    long.run(until=1000.0)
    assert len(long.running) == 12
    recovery, watch = Recovery(EMPTY), Invariants()
    for seq, (at, event, commands) in enumerate(long.trace.journal):
        recovery.apply(seq, at, event, commands)
        watch.recall(event, commands)
    rest = World(setup, Script(plan=plan), cap=12, recovery=recovery, now=1000.0, watch=watch)
    return rest.run(until=2000.0)


def went_on(trace: Trace) -> list[float]:
    return [at for at, _, commands in trace.journal for c in commands if isinstance(c, do.ContinueRollout)]


def test_rollouts_of_an_earlier_life_begin_again_no_faster_than_others_may_start() -> None:
    spec = train_env("sandbox", group_size=4, tasks_per_minute=60.0)
    trace = continued(setup_for(spec, batch=12, max_steps=3), lambda _rollout, _task: Plan())
    assert [round(after - before, 3) for before, after in pairwise(went_on(trace))] == [1.0] * 11
    starts = [at for at, _ in launches(trace)]
    assert starts[0] >= went_on(trace)[-1] + 1.0 - 1e-6


def test_rollouts_of_an_earlier_life_wait_while_their_environment_is_out() -> None:
    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        return Plan(((0.0, 0.1),), outcome=DOWN, reward=None)

    spec = train_env("sandbox", group_size=4, tasks_per_minute=60.0)
    trace = continued(setup_for(spec, batch=12, max_steps=3), plan)
    pauses = [after - before for before, after in pairwise(went_on(trace))]
    assert [round(pause, 3) for pause in pauses[FAILURES - 1 :]] == [1.1, 2.1, 4.1, 8.1], (
        "one is tried each time"
    )
    assert notes(trace)[0][1].out


def test_what_fails_in_one_group_alone_is_no_outage() -> None:
    setup = setup_for(train_env("sandbox", group_size=16, max_attempts=3), batch=16, max_steps=4)

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        poisonous = rollout.group == 1
        return (
            Plan(((0.0, 0.1),), outcome=DOWN, reward=None)
            if poisonous
            else Plan(reward=alternating(rollout, task, 0))
        )

    trace = World(setup, Script(plan=plan), cap=16).run()
    assert trace.finish is not None
    assert trace.finish.status == "done"
    assert not notes(trace)
    assert sum(r.outcome == DOWN for r in trace.ended) == 48
