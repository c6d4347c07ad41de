"""An environment that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task, TaskRef
from paceline.envs.protocol import (
    Context,
    EndlessTasks,
    Environment,
    InfrastructureError,
    ListTasks,
    Model,
    Result,
    TaskSource,
)
from paceline.testing.script import Plan, alternating

Course: TypeAlias = Callable[[Task, Model, Context], Awaitable[Result]]
"""What one rollout does."""


class ScriptedEnv(Environment):
    """`course` is carried out for every rollout; without one it is a single call, and members alternate 1 and 0."""

    def __init__(
        self,
        course: Course | None = None,
        *,
        tasks: int | None = None,
        on_truncated: Callable[[Task], Result | None] = lambda _task: None,
    ) -> None:
        """`tasks`: how many there are; None for an endless source. Their data is their number."""
        self._course = course or one_call
        self._tasks = tasks
        self._on_truncated = on_truncated
        self.running = 0
        """Rollouts under way; 0 once everything was torn down."""
        self.is_closed = False

    def tasks(self, split: Split) -> TaskSource:
        if self._tasks is None:
            return EndlessTasks(lambda index: index, "scripted")
        return ListTasks(range(self._tasks), "scripted")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        self.running += 1
        try:
            return await self._course(task, model, ctx)
        finally:
            self.running -= 1

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        return self._on_truncated(task)

    async def close(self) -> None:
        self.is_closed = True


async def one_call(task: Task, model: Model, ctx: Context) -> Result:
    """One model call; the reward is 1 for even members and 0 for odd ones."""
    await model.chat("go")
    return Result(reward=alternating(ctx.rollout, task.ref, 0))


def follow(plan: Callable[[RolloutId, TaskRef], Plan]) -> Course:
    """A course by `Plan`, as a `World` would take it. The engine decides how long its calls take, and which fail."""

    async def course(task: Task, model: Model, ctx: Context) -> Result:
        planned = plan(ctx.rollout, task.ref)
        for wait, _ in planned.turns:
            if wait:
                await ctx.sleep(wait)
            await model.chat("go on")
        outcome = planned.outcome
        if outcome.cause == "infrastructure":
            raise InfrastructureError(outcome.detail)
        if outcome.cause == "self":
            raise asyncio.CancelledError
        if outcome.ending == "failed":
            raise ValueError(outcome.detail)
        return Result(reward=planned.reward, truncated="turns" if outcome.ending == "truncated" else None)

    return course
