"""A run that is to repeat makes the same batches whatever takes how long, and whatever there is room for."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.config import EvalSection, Limits
from paceline.core.samplers import build_sampler
from paceline.core.samplers.pools import DifficultyPools
from paceline.core.scheduling.base import Scheduling
from paceline.core.scheduling.repeating import Repeating
from paceline.core.scheduling.synchronous import Synchronous
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.group import ClosedGroup, GroupResult
from paceline.domain.task import Task, TaskRef
from paceline.envs.protocol import Context, InfrastructureError, Model, Result
from paceline.runtime.in_order import InOrder
from paceline.testing import ScriptedEngine, ScriptedEnv, run_driver, setup_for, train_env
from paceline.testing.run import DriverRun

EVALS = (EvalSection(id="a", examples=3, every=1),)
ENVS = (
    train_env("a", tasks=7, group_size=3, max_attempts=3),
    train_env("b", group_size=2, tasks_per_minute=40, max_attempts=3),
)
LEARNS = msgspec.structs.replace(
    ENVS[0], sampler=partial(build_sampler, "difficulty", DifficultyPools, 7, 5, {})
)
SETUP = msgspec.structs.replace(
    setup_for(LEARNS, ENVS[1], batch=9, lag=0, max_staleness=0, max_steps=5, evals=EVALS, seq_len=512),
    mix_by="rollouts",
)


def run(timing: int, cap: int, scheduling: Scheduling) -> DriverRun:
    """What takes how long, and what fails at first, goes by `timing`; what comes of it does not."""
    chance = random.Random(timing)

    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await ctx.sleep(chance.uniform(0, 9))
        await model.chat("go")
        if task.ref.split == "train" and ctx.rollout.attempt < 2 and chance.random() < 0.1:
            raise InfrastructureError("the sandbox is gone")
        # Rewards that are often equal in a group: then it brings nothing, and another group is opened in its place.
        return Result(reward=float(ctx.rng.integers(0, 2)) / 3)

    return run_driver(
        SETUP,
        {"a": ScriptedEnv(course, tasks=7), "b": ScriptedEnv(course)},
        engines=[ScriptedEngine("x"), ScriptedEngine("y")],
        cap=cap,
        scheduling=scheduling,
    )


def batches(found: DriverRun) -> list[list[object]]:
    """Of each batch: who is in it, in order, of which task, with which advantage."""
    return [
        [(s.rollout[:2], s.task_index, s.reward, s.advantage, s.oldest_version) for s in c.batch.samples]
        for _, c in found.commands(do.ShipBatch)
    ]


def evals(found: DriverRun) -> list[object]:
    return [(c.env, c.version, c.newest_version, c.mean_reward) for _, c in found.commands(do.ReportEval)]


FIRST = run(0, 40, Repeating())


@pytest.mark.parametrize("timing", range(1, 9))
def test_the_batches_are_the_same_whatever_takes_how_long_and_whatever_there_is_room_for(timing: int) -> None:
    found = run(timing, (40, 12, 5, 2)[timing % 4], Repeating())
    assert found.finish is not None
    assert found.finish.status == "done"
    assert len(batches(found)) == 5
    assert batches(found) == batches(FIRST)
    assert evals(found) == evals(FIRST)
    opened = [c.group for _, c in found.commands(do.NoteOpened)]
    told = [
        event.result.group for _, event, _ in found.journal.entries if isinstance(event, on.GroupProcessed)
    ]
    assert told == sorted(told) == sorted(opened)
    assert len(told) > len({rollout[0] for batch in batches(found) for (rollout, *_) in batch})  # type: ignore[misc]


def test_a_synchronous_run_alone_does_not_repeat() -> None:
    """Else the test above would show nothing."""
    assert batches(run(1, 40, Synchronous())) != batches(run(2, 40, Synchronous()))


def test_no_version_changes_under_an_eval() -> None:
    versions = {(c.version, c.newest_version) for _, c in FIRST.commands(do.ReportEval)}
    assert versions == {(version, version) for version in range(6)}


def test_a_rollout_that_the_clock_cut_off_is_told() -> None:
    async def course(task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go")
        await ctx.sleep(1000.0 if ctx.rollout == (1, 1, 0) else 0.0)
        return Result(reward=float(ctx.rollout.member))

    found = run_driver(
        setup_for(batch=4, lag=0, max_staleness=0, max_steps=2, seq_len=512),
        {"env": ScriptedEnv(course)},
        limits=Limits(deadline_s=50),
        scheduling=Repeating(),
    )
    assert [note.split(", ")[0] for note in found.notes] == ["g1.m1.a0 was cut off by its deadline"]


async def test_one_that_waits_for_its_turn_when_the_run_ends_is_left_alone() -> None:
    class Now:
        async def process(self, group: ClosedGroup) -> on.GroupProcessed:
            return on.GroupProcessed(GroupResult(group.id, ()))

    core: Any = SimpleNamespace(processing={0: None, 1: None}, groups=SimpleNamespace(groups=list))
    order = InOrder(Now(), core, lambda note: None)  # type: ignore[arg-type]
    task = TaskRef("a", "train", 0)
    waits = asyncio.create_task(order.process(ClosedGroup(1, task, 0, ())))
    await asyncio.sleep(0)
    first = await order.process(ClosedGroup(0, task, 0, ()))
    waits.cancel()
    await asyncio.sleep(0)
    del core.processing[0]
    order.apply(0.0, first, ())
    assert waits.cancelled()
