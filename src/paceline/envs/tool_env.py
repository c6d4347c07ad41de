"""A model with tools: it calls them until it gives a final answer, which is scored.

start ─▶ chat ─▶ calls? ─yes─▶ all at once, in order ─▶ observations ─▶ chat …
                   └─no──▶ score
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Task
from paceline.envs.plain import called, runs_at_once
from paceline.envs.protocol import (
    ChatMessage,
    Context,
    Environment,
    Model,
    Result,
    RolloutTruncated,
    Says,
    ScoringError,
    messages_of,
)
from paceline.envs.tools import BadCall, CallFormat, TaggedCalls, ToolBox, ToolCall, numbered
from paceline.errors import said_by

_ABOUT_NOW_S: Final = 0.25
"""A deadline reaches a worker a little before or after the worker's own clock says so."""


log = logging.getLogger(__name__)


class ToolEnv(Environment):
    """Derive from it, list `tools`, and write `tasks`, `prompt` and `score`."""

    tools: Sequence[Callable[..., Any]] = ()
    """The functions that the model may call; see `paceline.envs.tools`."""
    call_format: CallFormat = TaggedCalls()
    """How calls stand in its answers."""
    system_prompt: str | None = None
    observe_as: ClassVar[str] = "tool"
    """Role of the messages that hold observations: `tool`, or `user` for templates without that role."""
    tool_s: float = 60.0
    """Seconds that one call may take; longer, and the model is told so."""
    most_chars: int = 4000
    """Characters of an observation; the middle of a longer one is cut out."""
    most_rounds: int | None = None
    """Rounds of calls after which the rollout is truncated (limit `turns`); None leaves it to the config's limits."""
    _box: ToolBox | None = None

    @property
    def declares_tools(self) -> bool:
        """Whether the chat template must know how to print a tool list."""
        return bool(self.tools) and self.call_format.in_template

    @property
    def box(self) -> ToolBox:
        """The tools, with their schemas. EnvError when one cannot be described."""
        if self._box is None:
            self._box = ToolBox(self.tools)
        return self._box

    # ── what you write ──

    def prompt(self, data: Any) -> Says:
        """What is asked: a text, or messages."""
        raise NotImplementedError(f"{type(self).__name__} must define prompt(data)")

    def state(self, data: Any, ctx: Context) -> Any:
        """What tools with a parameter `state` are given, made anew for each rollout; may be async. Chance goes by
        `ctx.group_rng`."""
        return None

    def is_over(self, state: Any) -> bool:
        """Whether a round of calls has ended the episode, so that it is scored without a final answer."""
        return False

    def score(self, data: Any, state: Any, text: str) -> Any:
        """The reward, or a whole `Result`, of the final answer; may be async.
        An exception leaves the rollout unscored."""
        raise NotImplementedError(f"{type(self).__name__} must define score(data, state, text)")

    def release(self, state: Any) -> Any:
        """Give back what `state` holds, however the rollout ended; may be async."""

    # ── what it does ──

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        episode = ctx.state = Episode(
            await called(self, self.state, task.data, ctx, unclaimed=self._release_in_vain)
        )
        try:
            result = await self._converse(task, model, ctx, episode)
        except BaseException as error:
            if not _will_be_judged(error, ctx):
                await self._release(episode)
            raise
        await self._release(episode)
        return result

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Scores what there is: the state, and what the model said last."""
        episode = ctx.state
        if not isinstance(episode, Episode):
            return None
        try:
            return None if model.last is None else await self._scored(task, episode, model.last.text)
        finally:
            await self._release(episode)

    async def _converse(self, task: Task, model: Model, ctx: Context, episode: Episode) -> Result:
        opening = list(messages_of(await called(self, self.prompt, task.data)))
        if self.system_prompt is not None:
            opening.insert(0, {"role": "system", "content": self.system_prompt})
        reply = await model.chat(opening, tools=self.box.schemas if self.declares_tools else None)
        while True:
            # A call that a limit cut in two is not carried out: the rollout is over.
            calls = [] if reply.finish == "length" else numbered(self.call_format.calls(reply.text))
            if not calls:
                break
            seen = await self._observe(calls, ctx, episode)
            if await called(self, self.is_over, episode.state):
                break
            if self.most_rounds is not None and episode.rounds >= self.most_rounds:
                scored = await self._scored(task, episode, reply.text)
                return msgspec.structs.replace(scored, truncated="turns")
            reply = await model.chat(seen)
        return await self._scored(task, episode, reply.text)

    async def _observe(
        self, calls: Sequence[ToolCall | BadCall], ctx: Context, episode: Episode
    ) -> list[ChatMessage]:
        """Carry out the calls of one answer, side by side; their observations in the order of the calls."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        work = [
            self.box.observe(call, episode.state, ctx, within_s=self.tool_s, most_chars=self.most_chars)
            for call in calls
        ]
        if len(work) == 1:
            observed = [await work[0]]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in work]
            observed = [task.result() for task in tasks]
        episode.took(loop.time() - began, len(calls), sum(not good for _, good in observed))
        said: list[ChatMessage] = []
        for call, (text, _) in zip(calls, observed, strict=True):
            if self.observe_as != "tool":
                said.append({"role": self.observe_as, "content": text})
            elif self.call_format.in_template:
                said.append({"role": "tool", "content": text, "name": call.name, "tool_call_id": call.id})
            else:
                said.append({"role": "tool", "content": text})
        return said

    async def _scored(self, task: Task, episode: Episode, text: str) -> Result:
        try:
            scored = await called(self, self.score, task.data, episode.state, text)
        except Exception as error:
            raise ScoringError(f"score() raised {said_by(error)}") from error
        result = scored if isinstance(scored, Result) else Result(reward=scored)
        return msgspec.structs.replace(result, metrics={**episode.metrics(), **result.metrics})

    async def _release_in_vain(self, state: Any) -> None:
        """The rollout was cancelled while a thread made its state."""
        await self._release(Episode(state))

    async def _release(self, episode: Episode) -> None:
        releasing = called(self, self.release, episode.state)
        if runs_at_once(self, self.release):
            await releasing
            return
        # One that stands in line for its thread must not lose its place, whatever becomes of the rollout meanwhile.
        chore = self.chores.add(releasing)
        try:
            await asyncio.shield(chore)
        except asyncio.CancelledError:
            chore.add_done_callback(_tell_if_failed)
            raise


def _tell_if_failed(chore: asyncio.Task[None]) -> None:
    if not chore.cancelled() and (error := chore.exception()) is not None:
        log.warning("release() of a rollout that has ended raised %s", said_by(error))


def _will_be_judged(error: BaseException, ctx: Context) -> bool:
    """Whether `on_truncated` comes next, and needs the state: a limit refused a call, or the deadline has come."""
    if isinstance(error, RolloutTruncated):
        return True
    return isinstance(error, asyncio.CancelledError) and ctx.seconds_left <= _ABOUT_NOW_S


class Episode:
    """How far a rollout with tools has come."""

    __slots__ = ("calls", "errors", "rounds", "seconds", "state")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.rounds = self.calls = self.errors = 0
        self.seconds = 0.0

    def took(self, seconds: float, calls: int, errors: int) -> None:
        self.rounds += 1
        self.seconds += seconds
        self.calls += calls
        self.errors += errors

    def metrics(self) -> dict[str, float]:
        return {
            "tool_calls": float(self.calls),
            "tool_errors": float(self.errors),
            "tool_s": self.seconds,
        }


def declares_tools(environment: Environment) -> bool:
    """Whether an environment needs a chat template that prints a tool list."""
    if isinstance(environment, ToolEnv):
        return environment.declares_tools
    return bool(getattr(environment, "tools", None))
