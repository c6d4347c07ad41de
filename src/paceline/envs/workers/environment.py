"""An environment whose code runs in workers, as the rollout runner sees it: an `Environment` like any other.

Ask ──▶ the runner's model: gate, engine, recorder, limits ──▶ Replied | Refused
CancelledError here (a deadline, a stale rollout) ──▶ Cancel ──▶ Ended, or the worker's death
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.program import Serves
from paceline.envs.protocol import (
    Context,
    Environment,
    InfrastructureError,
    Model,
    Reply,
    Result,
    RolloutTruncated,
    ScoringError,
)
from paceline.envs.workers import wire
from paceline.envs.workers.pool import Call, Died, WorkerPool
from paceline.envs.workers.remote import said_of
from paceline.errors import EngineError, EnvError, ModelCallFailed, PacelineError, said_by


class RemoteTasks:
    """The tasks of a worker's environment: how many there are. The worker has them."""

    def __init__(self, size: int | None, fingerprint: str) -> None:
        self.size = size
        self.fingerprint = fingerprint

    def get(self, index: int) -> Any:
        return None


class RemoteEnvironment(Environment):
    """Runs its rollouts in the workers of `pool`, which has been started."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        opened = pool.opened
        # What the class of an inline environment says for all its objects, this one says for itself.
        self.all_or_nothing = opened.all_or_nothing  # type: ignore[misc]
        self.whole_group = opened.whole_group  # type: ignore[misc]
        self.replayable = opened.replayable  # type: ignore[misc]
        self.roles = opened.roles

    def tasks(self, split: Split) -> RemoteTasks:
        return RemoteTasks(self.pool.opened.size, self.pool.opened.fingerprint)

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        group = (ctx.rollout.group, ctx.rollout.attempt) if self.whole_group else None
        call = await self.pool.call(group)
        ctx.state = _Visit(call, group)
        # After an interruption the call is kept for `on_truncated`, which only a limit brings about.
        ctx._at_end.append(partial(self.pool.release, call, group))
        call.send(
            wire.Start(
                call.number,
                ctx.rollout,
                task.ref,
                ctx.group_seed,
                ctx._noise_seed,
                max(0.0, ctx.seconds_left),
            )
        )
        judged = False
        try:
            ended = await _Service(call, model).until_ended()
            judged = ended.failure is not None and ended.failure.interrupted
            return _result(ended)
        finally:
            if not judged:
                self.pool.release(call, group)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        visit = ctx.state
        if not isinstance(visit, _Visit) or visit.call.number not in visit.call.member.calls:
            return None
        last = None if model.last is None else said_of(model.last)
        visit.call.send(wire.Judge(visit.call.number, limit, max(0.0, ctx.seconds_left), last))
        try:
            ended = await _Service(visit.call, model).until_ended()
            return None if ended.told is None and ended.failure is None else _result(ended)
        finally:
            self.pool.release(visit.call, visit.group)

    async def close(self) -> None:
        await self.pool.close()


class _Visit:
    """Where a rollout is: `on_truncated` asks there."""

    __slots__ = ("call", "group")

    def __init__(self, call: Call, group: Any) -> None:
        self.call = call
        self.group = group


class _Programs:
    """Programs of a rollout that the gateway serves."""

    __slots__ = ("are_over", "task")

    def __init__(self) -> None:
        self.are_over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        """Holds the gateway's session open."""

    async def end(self) -> None:
        """Returns when no call of theirs runs any more, though it is cancelled meanwhile. Raises what closing raised."""
        assert self.task is not None
        self.are_over.set()
        was_cancelled = False
        while not self.task.done():
            try:
                await asyncio.wait((self.task,))
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError
        self.task.result()


class _Service:
    """Answers one call's questions until it has ended."""

    def __init__(self, call: Call, model: Model) -> None:
        self._call = call
        self._model = model
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._programs: dict[int, _Programs] = {}
        self._endings: set[asyncio.Task[None]] = set()
        """Answers to `EndServe`: not cancelled, for what they end must have ended."""

    async def until_ended(self) -> wire.Ended:
        """Its end. CancelledError only when the worker's code has stopped; InfrastructureError when the worker died."""
        try:
            return await self._until_ended()
        finally:
            # Of code that ended, or died with its worker, without ending them.
            for programs in list(self._programs.values()):
                await programs.end()
            if self._endings:
                await asyncio.wait(self._endings)

    async def _until_ended(self) -> wire.Ended:
        call, cancelled = self._call, False
        while True:
            try:
                record = await call.inbox.get()
            except asyncio.CancelledError:
                # It has ended when the worker says so, or is dead: until then its code runs, and holds its permit.
                cancelled = True
                for ask in self._asks.values():
                    ask.cancel()
                for programs in self._programs.values():
                    programs.are_over.set()
                call.send(wire.Cancel(call.number))
                continue
            if isinstance(record, wire.Ask):
                self._asks[record.ask] = asyncio.get_running_loop().create_task(self._answer(record))
            elif isinstance(record, wire.BeginServe):
                programs = self._programs[record.ask] = _Programs()
                programs.task = asyncio.get_running_loop().create_task(self._serve(record.ask, programs))
            elif isinstance(record, wire.EndServe):
                ending = asyncio.get_running_loop().create_task(self._unserve(record))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
            elif isinstance(record, wire.GiveUp):
                if (given_up := self._asks.get(record.ask)) is not None:
                    given_up.cancel()
            elif isinstance(record, Died):
                if cancelled:
                    raise asyncio.CancelledError
                raise InfrastructureError(record.why)
            else:
                return record

    async def _serve(self, ask: int, programs: _Programs) -> None:
        """Let programs of the rollout ask its model until they are over."""
        call, model, opened = self._call, self._model, False
        try:
            if not isinstance(model, Serves):
                raise EnvError("this model serves no programs")
            async with model.serve() as endpoint:
                opened = True
                call.send(wire.Serving(call.number, ask, endpoint.base_url, endpoint.secret))
                await programs.are_over.wait()
        except Exception as error:  # the worker waits for an answer
            if opened:
                raise  # told to whoever ends it
            call.send(wire.Refused(call.number, ask, "error", _told(error)))

    async def _unserve(self, asked: wire.EndServe) -> None:
        call, programs = self._call, self._programs.pop(asked.serving, None)
        try:
            if programs is not None:
                await programs.end()
            last = self._model.last
            call.send(wire.Unserved(call.number, asked.ask, None if last is None else said_of(last)))
        except Exception as error:  # the worker waits for an answer
            call.send(wire.Refused(call.number, asked.ask, "error", _told(error)))

    async def _answer(self, asked: wire.Ask) -> None:
        call, model = self._call, self._model
        try:
            if asked.method == "chat":
                reply = await model.chat(asked.messages, tools=asked.tools, max_tokens=asked.max_tokens)
            elif asked.method == "complete":
                reply = await model.complete(asked.messages, tools=asked.tools, max_tokens=asked.max_tokens)
            else:
                ids = np.frombuffer(asked.token_ids, "<i4").astype(np.int32)
                reply = await model.generate(ids, max_tokens=asked.max_tokens)
            call.send(_replied(call.number, asked.ask, reply))
        except RolloutTruncated as error:
            call.send(wire.Refused(call.number, asked.ask, "truncated", str(error), error.limit))
        except EngineError as error:
            call.send(wire.Refused(call.number, asked.ask, "engine", str(error)))
        except asyncio.CancelledError:
            call.send(wire.Refused(call.number, asked.ask, "cancelled", "the rollout is being cancelled"))
            raise
        except Exception as error:  # the rollout must not wait for ever
            call.send(wire.Refused(call.number, asked.ask, "error", _told(error)))
        finally:
            self._asks.pop(asked.ask, None)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else said_by(error)


def _replied(call: int, ask: int, reply: Reply) -> wire.Replied:
    return wire.Replied(call, ask, said_of(reply))


def _result(ended: wire.Ended) -> Result:
    """What the environment returned; raises what it raised."""
    if ended.failure is not None:
        raise _raised(ended.failure)
    told = ended.told
    if told is None:
        raise EnvError("rollout() returned NoneType; expected Result")
    return Result(
        told.reward,
        told.rewards,
        told.metrics,
        told.truncated,
        told.info,
        tuple(told.turn_rewards),
        told.role,
        told.trains,
    )


def _raised(failure: wire.Failure) -> BaseException:
    """An exception that the runner judges, and shows, as it would the one that was raised in the worker."""
    if failure.kind == "cancelled":
        return asyncio.CancelledError()
    if failure.kind == "truncated":
        return RolloutTruncated(failure.limit, failure.text)
    name, colon, text = failure.text.partition(": ")
    if not colon or not name.isidentifier():
        name, text = "EnvError", failure.text
    base = {"unscored": ScoringError, "infrastructure": InfrastructureError, "engine": ModelCallFailed}.get(
        failure.kind, EnvError
    )
    error: BaseException = type(name, (base,), {})(text)
    if failure.interrupted:
        error.__context__ = asyncio.CancelledError()
    return error
