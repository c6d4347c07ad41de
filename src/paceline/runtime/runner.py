"""Runs one rollout: the environment's coroutine, its budgets, and its one terminal record.

`run` answers `StartRollout` and `ContinueRollout`. Whatever happens in the environment, the engine or the scorer, it
returns exactly one `Rollout`, and only when the work has really stopped.

How a rollout ends, first match first:

| what happened | ending, cause |
| --- | --- |
| the run cancelled it | `cancelled`, the cause it was asked for |
| a model call failed, whatever the environment made of that | `failed`, `engine`; other members of a shared call that it ended, too (`envs.causes`) |
| a limit refused or cut a model call, or the deadline passed | `truncated`, the limit; scored if the environment can |
| the environment raised `CancelledError` by itself | `cancelled`, `self` |
| it raised `ScoringError` | `failed`, `unscored` |
| it raised `InfrastructureError`, or an OSError that another attempt may not meet again | `failed`, `infrastructure` |
| it raised anything else, or returned no `Result` | `failed`, `environment` |
| no token was sampled | `failed`, `empty` |
| its last turn was cut by a token or context limit, or the environment names a limit | `truncated`, the limit |
| the reward is not a number, or not finite; or missing, of a rollout that trains | `failed`, `unscored` |
| else | `completed` |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from paceline.domain.commands import ContinueRollout
from paceline.domain.events import RolloutContinued
from paceline.domain.ids import EngineId, EnvName, RolloutId
from paceline.domain.part import Part
from paceline.domain.rollout import COMPLETED, CancelCause, Outcome, Rollout
from paceline.domain.task import Split, Task
from paceline.envs.causes import is_interruption
from paceline.envs.protocol import Context, Result, RolloutTruncated, task_data
from paceline.envs.text import cut_text
from paceline.errors import EngineError, EnvError, InvariantError
from paceline.ports import Engine, Parts
from paceline.runtime.calls import Calls, EnvRuntime
from paceline.runtime.gate import TurnGate
from paceline.runtime.gateway.server import Gateway
from paceline.runtime.impossible import ImpossibleWatch
from paceline.runtime.model import Launch, ModelCalls
from paceline.runtime.outcomes import (
    LIMITS,
    MOST_TEXT,
    as_numbers,
    by_turn,
    failed,
    no_limit,
    outcome_of,
    storable,
    text_of,
)

STOP_S: Final = 5.0
"""Seconds an aborted engine request has to come back with its tokens, and a cancelled environment to clean up, before
it is cancelled (again)."""

STUCK_S: Final = 300.0
"""Seconds of being cancelled again and again after which a rollout does not stop: its place is lost, and with enough of
them the run would wait for ever."""

_NOTHING: Final = Result(None)


class RolloutRunner:
    """Runs rollouts, any number at once, on the loop it is called from."""

    def __init__(
        self,
        environments: Mapping[tuple[Split, EnvName], EnvRuntime],
        engines: Mapping[EngineId, Engine],
        gate: TurnGate,
        clock: Callable[[], float],
        *,
        noise_by_position: bool = False,
        gateway: Gateway | None = None,
        parts: Parts | None = None,
        left: Mapping[RolloutId, Sequence[Part]] | None = None,
        calls_of: Callable[[Launch, EnvRuntime], Calls] | None = None,
    ) -> None:
        """`gateway` serves agent programs; without one, no rollout can.

        `parts` keeps what rollouts sample until they end; `left` is what an earlier life has kept of those that go on.

        `calls_of` makes what plays a rollout; left out, it samples on the engines.

        `noise_by_position`: the engines' noise depends on (seed, position in the sequence) alone, so a turn may
        keep its seed over its segments and comes out as if it had not been cut. Others get a seed a segment."""
        self._environments = environments
        self._engines = engines
        self._gate = gate
        self._clock = clock
        self._noise_by_position = noise_by_position
        self._gateway = gateway
        self._parts = parts
        self._left = dict(left or {})
        self._calls_of = calls_of or self._on_engines
        self._told: set[EnvName] = set()
        """Environments that did not repeat themselves, as far as it was told."""
        self.on_continued: Callable[[RolloutContinued], None] = lambda event: None
        """Told of each rollout of an earlier life that has come to the end of its record."""
        self.on_note: Callable[[str], None] = lambda note: None
        """Told once of each environment whose rollouts leave their record, and of engines whose logprobs cannot be any."""
        self._impossible = ImpossibleWatch(lambda note: self.on_note(note))
        self._running: dict[RolloutId, _Run] = {}
        self._early: dict[RolloutId, CancelCause] = {}  # cancelled before their task has taken its first step
        self.is_sole_canceller = False
        """True while nobody cancels the tasks of `run` but through `cancel`: what else cancels one is its environment."""
        self.hears_signals = False
        """True where Ctrl-C comes as a signal that somebody handles: a KeyboardInterrupt is then what an environment raised."""
        self.on_stuck: Callable[[EnvError], None] = lambda error: None
        """Told of a rollout that did not stop for `STUCK_S`."""

    @property
    def running(self) -> int:
        """Rollouts that have not returned their record yet."""
        return len(self._running)

    async def run(self, command: Launch) -> Rollout:
        """Carry out one rollout, or go on with it; see the module for how it ends. Raises only when the task itself is
        cancelled."""
        shared = self._environments.get((command.task.split, command.task.env))
        if shared is None:
            raise InvariantError(f"no environment {command.task.env!r} for split {command.task.split!r}")
        run = _Run(self, command, shared, self._calls_of(command, shared), self._clock)
        self._running[command.rollout] = run
        early = self._early.pop(command.rollout, None)
        try:
            ended = await run.to_its_end() if early is None else run.unstarted(early)
        finally:
            del self._running[command.rollout]
        if self._parts is not None:
            self._parts.ended(command.rollout)
        return ended

    def cancel(self, rollout: RolloutId, cause: CancelCause) -> None:
        """Make a rollout end soon, with the tokens it has. One that has ended already is left alone."""
        run = self._running.get(rollout)
        if run is not None:
            run.cancel(cause)
            return
        # It has ended, or its task was created a moment ago and runs before what is scheduled here.
        self._early.setdefault(rollout, cause)
        asyncio.get_running_loop().call_soon(self._early.pop, rollout, None)

    def park(self, rollout: RolloutId) -> None:
        """Take a rollout off its engine: a call under way comes back with the tokens it has, and asks the gate for the
        rest. One that makes no call now, or has ended, is left alone: the gate holds its next one."""
        run = self._running.get(rollout)
        if run is not None:
            run.park()

    def _on_engines(self, command: Launch, shared: EnvRuntime) -> ModelCalls:
        return ModelCalls(
            command,
            shared,
            self._engines,
            self._gate,
            self._clock,
            noise_by_position=self._noise_by_position,
            impossible=self._impossible,
            gateway=self._gateway,
            parts=self._left.pop(command.rollout, ()),
            keep=None if self._parts is None else self._parts.keep,
            on_record_end=partial(self._record_ended, command.task.env),
        )

    def _record_ended(self, env: EnvName, event: RolloutContinued, strayed: str) -> None:
        self.on_continued(event)
        if strayed and env not in self._told:
            self._told.add(env)
            self.on_note(
                f"env {env!r} does not do again what it did before the restart: of rollout {event.rollout}, {strayed}. It "
                f"goes on from there without {event.lost} tokens. Further ones are counted and not told: paceline explain "
                "says how each went on"
            )


class _Run:
    """One rollout on its way."""

    __slots__ = (
        "_aborts",
        "_cancels",
        "_clock",
        "_command",
        "_ctx",
        "_insisted",
        "_loop",
        "_model",
        "_runner",
        "_shared",
        "_started",
        "_task",
        "_timer",
    )

    def __init__(
        self,
        runner: RolloutRunner,
        command: Launch,
        shared: EnvRuntime,
        model: Calls,
        clock: Callable[[], float],
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._runner = runner
        self._command = command
        self._shared = shared
        self._clock = clock
        self._loop = task.get_loop()
        self._task = task
        self._model = model
        # What was used in an earlier life counts, but no wait to go on; the clock stood still between the two.
        self._started, stood_s = clock(), 0.0
        if isinstance(command, ContinueRollout):
            self._started, stood_s = command.started, command.stood_s
        self._ctx = Context(
            command.rollout,
            group_seed=command.group_seed,
            noise_seed=command.noise_seed,
            deadline=self._started + stood_s + shared.limits.deadline_s,
            clock=clock,
        )
        self._timer = self._loop.call_later(max(0.0, self._ctx.deadline - clock()), self._pass_deadline)
        self._aborts: tuple[asyncio.Task[None], ...] = ()
        """Requests that are being stopped: what is parked may be cancelled meanwhile."""
        self._cancels = 0  # of our own task, by us
        self._insisted = 0

    async def to_its_end(self) -> Rollout:
        try:
            outcome, result = await self._perform()
            if self._model.caller is not None:
                await self._end_stray_call(self._model.caller)
                if outcome.ending == "completed" or outcome.cause in ("empty", "unscored"):
                    outcome = failed("environment", "rollout() returned while a model call of it still ran")
        finally:
            self._timer.cancel()
            for abort in self._aborts:
                abort.cancel()
            # A task that the environment left behind may call the model later: nobody is there to ask for it.
            self._model.stop = self._model.stop or "self"
            for give_back in self._ctx._at_end:
                give_back()
        self._model.end_record()
        return self._record(outcome, result)

    def unstarted(self, cause: CancelCause) -> Rollout:
        """The record of a rollout that was cancelled before it began."""
        self._timer.cancel()
        self._model.end_record()
        return self._record(Outcome("cancelled", cause), None)

    def cancel(self, cause: CancelCause) -> None:
        if self._model.stop is None:
            self._model.stop = cause
            self._interrupt()

    def park(self) -> None:
        model = self._model
        if model.stop is None and model.limit is None:
            model.park()
            if model.engine is not None:
                self._stop_request(model.engine)

    # ── the environment's part ──

    async def _perform(self) -> tuple[Outcome, Result | None]:
        shared, model, ctx = self._shared, self._model, self._ctx
        task = Task(self._command.task, None)
        result: Any = None
        failure: BaseException | None = None
        try:
            task = Task(
                self._command.task,
                await task_data(shared.environment, shared.source, self._command.task.index),
            )
            result = await shared.environment.rollout(task, model, ctx)
        except BaseException as error:
            self._raise_if_ended_from_outside(error)
            failure = error
        if model.stop is not None:
            return Outcome("cancelled", model.stop), None
        if model.engine_error is not None:
            return failed("engine", model.engine_error), None
        if failure is None:
            if model.limit is None:
                return self._judge(result)
            # The environment caught what a limit raised and came to a result of its own.
            return self._truncated(result)
        if isinstance(failure, RolloutTruncated) and model.limit is None:
            if failure.limit not in LIMITS:
                return no_limit(failure.limit), None
            model.give_out(failure.limit, str(failure))  # a limit of the environment's own
        if model.limit is not None and is_interruption(failure):
            return await self._close(task)
        return outcome_of(failure), None

    async def _close(self, task: Task) -> tuple[Outcome, Result | None]:
        """Ask the environment what a rollout is worth that a limit has ended."""
        model, limits = self._model, self._shared.limits
        assert model.limit is not None
        left = max(limits.score_s, self._ctx.deadline - self._clock())
        self._timer.cancel()
        self._timer = self._loop.call_later(left, self._interrupt)
        try:
            result = await self._shared.environment.on_truncated(task, model, self._ctx, model.limit)
        except BaseException as error:
            self._raise_if_ended_from_outside(error)
            if isinstance(error, asyncio.CancelledError):
                why = f"not scored within {left:g} s (limits.score_s)"
            else:
                why = f"not scored: {text_of(error)}"
            result = None
        else:
            why = "" if result is not None else "not scored: the environment does not score what is cut short"
        if model.stop is not None:
            return Outcome("cancelled", model.stop), None
        return self._truncated(result, why)

    def _raise_if_ended_from_outside(self, error: BaseException) -> None:
        """Let a cancellation of the task by others than this module end it: the loop is shutting down."""
        # An environment's interrupt that left the task would leave the loop too, past everything that has to be stopped.
        if isinstance(error, KeyboardInterrupt) and not self._runner.hears_signals:
            raise error
        while self._cancels and self._task.cancelling():
            self._task.uncancel()
            self._cancels -= 1
        if isinstance(error, asyncio.CancelledError) and self._task.cancelling():
            if not self._runner.is_sole_canceller:
                raise error
            while self._task.cancelling():  # the environment cancelled its own task, or a library of its did
                self._task.uncancel()

    async def _end_stray_call(self, caller: asyncio.Task[Any]) -> None:
        """The environment has ended and left a model call running in a task of its own: stop that first."""
        model = self._model
        model.stop = model.stop or "self"
        model.left = self._loop.create_future()
        self._timer.cancel()
        if model.where == "env":
            caller.cancel()
        else:
            self._stop_waiting()
        await asyncio.wait({model.left}, timeout=STOP_S)
        if not model.left.done():
            caller.cancel()
            await asyncio.wait({model.left}, timeout=STOP_S)

    # ── what it comes to ──

    def _judge(self, result: Any) -> tuple[Outcome, Result | None]:
        model = self._model
        if not isinstance(result, Result):
            return failed("environment", f"rollout() returned {type(result).__name__}; expected Result"), None
        if not model.recorder.sampled_tokens:
            turns = len(model.recorder.turns)
            return failed("empty", f"{turns} model calls sampled no token"), as_numbers(result)[0]
        limit = result.truncated or model.cut
        if limit is not None and limit not in LIMITS:
            return no_limit(limit), None
        if limit is not None:
            model.limit = limit
            model.limit_text = "the environment's own limit" if result.truncated else f"answer cut by {limit}"
            return self._truncated(result)
        scored, why = as_numbers(result)
        return (failed("unscored", why) if why else COMPLETED), scored

    def _truncated(self, result: Any, why: str = "") -> tuple[Outcome, Result | None]:
        model = self._model
        if result is not None:
            if isinstance(result, Result):
                result, problem = as_numbers(result)
                why = f"not scored: {problem}" if problem else why
            else:
                result, why = None, f"not scored: {type(result).__name__} returned; expected Result"
        detail = f"{model.limit_text}; {why}" if why else model.limit_text
        return Outcome("truncated", model.limit, cut_text(detail, MOST_TEXT)), result

    def _record(self, outcome: Outcome, result: Result | None) -> Rollout:
        model, command = self._model, self._command
        said = result if result is not None else _NOTHING
        return Rollout(
            id=command.rollout,
            task=command.task,
            outcome=outcome,
            turns=tuple(model.recorder.turns),
            reward=said.reward if outcome.ending in ("completed", "truncated") else None,
            rewards=said.rewards,
            metrics=said.metrics,
            temperature=self._shared.sampling.temperature,
            started=self._started,
            ended=self._clock(),
            model_s=model.model_s,
            gate_s=model.gate_s,
            messages=model.messages(),
            turn_rewards=by_turn(said.turn_rewards, len(model.recorder.turns)),
            role=said.role,
            trains=said.trains,
            info=storable(said.info) if said.info else said.info,
        )

    # ── making it end ──

    def _pass_deadline(self) -> None:
        model = self._model
        if model.limit is None:
            model.give_out("deadline", f"{self._shared.limits.deadline_s:g} s (limits.deadline_s)")
        self._interrupt()

    def _interrupt(self) -> None:
        """End what the rollout waits for, and see to it again in a while if that was not enough."""
        model = self._model
        self._timer.cancel()
        self._timer = self._loop.call_later(STOP_S, self._insist)
        if model.where != "env":
            self._stop_waiting()
        # While a program is served, the gateway makes the call and the environment waits for the program.
        if model.where == "env" or model.serves:
            self._insist()

    def _stop_waiting(self) -> None:
        """End the wait at the gate or for the engine."""
        model = self._model
        if model.pending is not None:
            model.pending.cancel()
        elif model.engine is not None:
            # Not cancelled: the request comes back with what it has sampled.
            self._stop_request(model.engine)

    def _stop_request(self, engine: Engine) -> None:
        task = self._loop.create_task(_abort(engine, self._model.request_id))
        self._aborts = (*[each for each in self._aborts if not each.done()], task)

    def _insist(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(STOP_S, self._insist)
        self._insisted += 1
        if self._insisted * STOP_S > STUCK_S:
            self._insisted = 0
            self._runner.on_stuck(
                EnvError(
                    f"rollout {self._command.rollout} of env {self._command.task.env!r} did not stop within "
                    f"{STUCK_S:g} s of being cancelled: its code catches CancelledError and goes on; let that pass"
                )
            )
        self._cancels += 1
        self._task.cancel()


async def _abort(engine: Engine, request_id: str) -> None:
    with contextlib.suppress(EngineError):  # the request is then cancelled, STOP_S later
        await engine.abort(request_id)
