"""The loop that everything hangs on: events to the core, its commands to the world.

    rollout tasks ─┐                       ┌─▶ start / cancel a rollout task, open a turn gate
    engine updates ├─▶ inbox ─▶ core.handle ─▶ journal, folds ─▶ perform ─┼─▶ process a group in a thread
    watcher, loads ┘     (one callback,                                   ├─▶ pack and ship, in order
                          slices of 2 ms)                                 └─▶ update an engine, save, wake

Events are drained by a plain callback, not by a task that is switched to: a completion costs the same at 64 and at
16,384 in flight. Draining yields every 2 ms, so that a burst of completions cannot keep the loop from its sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from paceline.core.packing import pack
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId
from paceline.errors import InvariantError, PacelineError, TrainerError
from paceline.ports import BatchSink, Engine, Journal, PolicySource
from paceline.runtime.offload import Offload
from paceline.runtime.processor import GroupProcessor
from paceline.runtime.runner import RolloutRunner

_SLICE_S = 0.002
"""Longest stretch of draining before the loop gets a turn; performance.md's measured lags come from none."""


class Fold(Protocol):
    """Something that watches the run: it sees every decision, in order, as it is made."""

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None: ...


class CheckpointStore(Protocol):
    """Where the core's own state is kept."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write durably and atomically; called in a worker thread."""
        ...


class PackSettings(Protocol):
    """What packing needs to know (`BatchSection` has it)."""

    @property
    def seq_len(self) -> int: ...
    @property
    def micro_batch_tokens(self) -> int | None: ...
    @property
    def data_parallel(self) -> int: ...
    @property
    def pad_to_multiple_of(self) -> int: ...


class ComponentFailed(PacelineError):
    """A background part of the run raised something unexpected; its cause is chained."""


class Driver:
    """Runs one core against the world until it finishes. Implements `TurnGate` for the rollout runner."""

    def __init__(
        self,
        core: Core,
        *,
        engines: Mapping[EngineId, Engine],
        processor: GroupProcessor,
        sink: BatchSink,
        policy: PolicySource,
        journal: Journal,
        checkpoints: CheckpointStore,
        packing: PackSettings,
        offload: Offload,
        folds: Sequence[Fold] = (),
        clock: Callable[[], float] | None = None,
        step_limit_s: float = float("inf"),
    ) -> None:
        """`step_limit_s`: seconds a shipped batch may wait for the trainer's acknowledgement."""
        self.core = core
        self._engines = engines
        self._processor = processor
        self._sink = sink
        self._policy = policy
        self._journal = journal
        self._checkpoints = checkpoints
        self._packing = packing
        self._offload = offload
        self._folds = tuple(folds)
        self._step_limit_s = step_limit_s
        self._loop = asyncio.get_running_loop()
        self.clock = clock or self._loop.time
        self._inbox: deque[Event] = deque()
        self._scheduled = False
        self._gates: dict[RolloutId, asyncio.Future[do.GrantTurn]] = {}
        self._ships: asyncio.Queue[do.ShipBatch] = asyncio.Queue()
        self._finish: asyncio.Future[do.FinishRun] = self._loop.create_future()
        self._runner: RolloutRunner | None = None
        self._background: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._shipped_at: dict[int, float] = {}
        self._perform: dict[type, Callable[[Any], None]] = {
            do.StartRollout: self._start_rollout,
            do.GrantTurn: self._grant_turn,
            do.CancelRollout: self._cancel_rollout,
            do.ProcessGroup: self._process_group,
            do.UpdateWeights: self._update_weights,
            do.ShipBatch: self._ships.put_nowait,
            do.SaveCheckpoint: self._save_checkpoint,
            do.WakeAt: self._set_alarm,
            do.ReportEval: _seen_by_folds,
            do.NoteStale: _seen_by_folds,
            do.ForgetGroup: _seen_by_folds,
            do.FinishRun: self._finish_run,
        }

    # ── the run ──

    def attach(self, runner: RolloutRunner) -> None:
        """The runner that carries out `StartRollout`; it was built with this driver as its gate."""
        self._runner = runner

    def beside(self, name: str, coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something for as long as the run lasts; if it fails, the run fails and names it."""
        self._background.append((name, coroutine))

    async def run(self, opened: on.RunOpened, joined: Sequence[on.EngineJoined]) -> do.FinishRun:
        """Run to the end. Raises what ended the run when that was an error, the first of several."""
        background: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for name, make in (
                    ("batch shipper", self._ship_batches),
                    ("policy watcher", self._watch_policy),
                    *self._background,
                ):
                    background.append(tasks.create_task(_named(name, make()), name=name))
                self.post(opened)
                for event in joined:
                    self.post(event)
                finish = await self._finish
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            self._tasks = None
            await self._journal.flush()
        return finish

    def post(self, event: Event) -> None:
        """Report something that happened. Handled in order, soon, on this loop."""
        self._inbox.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def fail(self, error: BaseException) -> None:
        """End the run with this cause."""
        if not self._finish.done():
            self._finish.set_exception(error)

    def _drain(self) -> None:
        self._scheduled = False
        inbox, core, perform = self._inbox, self.core, self._perform
        until = perf_counter() + _SLICE_S
        try:
            while inbox:
                event = inbox.popleft()
                at = self.clock()
                commands = core.handle(event, at)
                self._journal.append(at, event, commands)
                for fold in self._folds:
                    fold.apply(at, event, commands)
                for command in commands:
                    perform[type(command)](command)
                if perf_counter() > until and inbox:
                    self._scheduled = True
                    self._loop.call_soon(self._drain)
                    return
        except Exception as error:
            # The core refused an event, or a command could not be carried out: nobody can go on from here.
            self._inbox.clear()
            self.fail(error)

    # ── the turn gate ──

    def request(self, event: on.TurnRequested) -> asyncio.Future[do.GrantTurn]:
        """A rollout asks for a model call; the future is set when it may go ahead."""
        future: asyncio.Future[do.GrantTurn] = self._loop.create_future()
        self._gates[event.rollout] = future
        self.post(event)
        return future

    def report(self, event: on.SegmentEnded) -> None:
        """The model call that was granted has ended."""
        self.post(event)

    def _grant_turn(self, command: do.GrantTurn) -> None:
        future = self._gates.pop(command.rollout, None)
        if future is not None and not future.done():
            future.set_result(command)
            return
        # The rollout ended at the gate (deadline, cancel) while its request was in the inbox. Its `RolloutEnded` may
        # be queued already, and must find the call answered: hence the front of the queue.
        self._inbox.appendleft(on.SegmentEnded(command.rollout, command.engine, (), "abort"))

    # ── commands ──

    def _start_rollout(self, command: do.StartRollout) -> None:
        assert self._tasks is not None and self._runner is not None
        self._tasks.create_task(self._roll_out(self._runner, command))

    async def _roll_out(self, runner: RolloutRunner, command: do.StartRollout) -> None:
        rollout = await runner.run(command)
        self._gates.pop(command.rollout, None)
        self.post(on.RolloutEnded(rollout))

    def _cancel_rollout(self, command: do.CancelRollout) -> None:
        if self._runner is not None:
            self._runner.cancel(command.rollout, command.cause)

    def _process_group(self, command: do.ProcessGroup) -> None:
        self._spawn(self._processor.process(command.group), self.post)

    def _update_weights(self, command: do.UpdateWeights) -> None:
        async def update() -> on.WeightsLoaded:
            began = self.clock()
            error = None
            try:
                await self._engines[command.engine].update_weights(command.version, command.path)
            except PacelineError as failure:
                error = str(failure)
            return on.WeightsLoaded(command.engine, command.version, self.clock() - began, error)

        self._spawn(update(), self.post)

    def _save_checkpoint(self, command: do.SaveCheckpoint) -> None:
        async def save() -> on.CheckpointSaved:
            began = self.clock()
            await self._journal.flush()
            await self._offload.run(self._checkpoints.save, command.step, command.state)
            return on.CheckpointSaved(command.step, self.clock() - began)

        self._spawn(save(), self.post)

    def _set_alarm(self, command: do.WakeAt) -> None:
        delay = max(0.0, command.at - self.clock())
        self._loop.call_later(delay, self.post, on.TimerFired())

    def _finish_run(self, command: do.FinishRun) -> None:
        if not self._finish.done():
            self._finish.set_result(command)

    def _spawn(self, coroutine: Coroutine[Any, Any, Event], then: Callable[[Event], None]) -> None:
        async def answer() -> None:
            then(await coroutine)

        assert self._tasks is not None
        self._tasks.create_task(answer())

    # ── what runs beside ──

    async def _ship_batches(self) -> None:
        """Pack and ship one batch after the other: the trainer must find them in order."""
        settings = self._packing
        while True:
            batch = (await self._ships.get()).batch
            began = self.clock()
            packed = await self._offload.run(
                pack,
                batch,
                ranks=settings.data_parallel,
                micro_batch_tokens=settings.micro_batch_tokens or settings.seq_len,
                pad_to_multiple_of=settings.pad_to_multiple_of,
            )
            packed_at = self.clock()
            size = await self._sink.ship(packed)
            self._expect_acknowledgement(batch.step)
            self.post(on.BatchShipped(batch.step, size, packed_at - began, self.clock() - packed_at))

    async def _watch_policy(self) -> None:
        while True:
            published = await self._policy.next()
            if published.trained_step is not None:
                self._shipped_at.pop(published.trained_step, None)
                self.post(on.StepTrained(published.trained_step, published.metrics))
            if published.version is not None:
                self.post(on.PolicyPublished(published.version, published.path))

    def _expect_acknowledgement(self, step: int) -> None:
        if self._step_limit_s == float("inf"):
            return
        self._shipped_at[step] = self.clock()
        self._loop.call_later(self._step_limit_s, self._check_trainer, step)

    def _check_trainer(self, step: int) -> None:
        """The trainer takes batches in order, so a batch's own clock starts when the one before is acknowledged."""
        if step not in self._shipped_at or self._finish.done():
            return
        if min(self._shipped_at) < step:
            self._shipped_at[step] = self.clock()
            self._loop.call_later(self._step_limit_s, self._check_trainer, step)
            return
        self.fail(
            TrainerError(
                f"batch {step} was shipped {self._step_limit_s:g} s ago and the trainer has not acknowledged it: it "
                "hangs or reads elsewhere; look at its log, or raise trainer.step_s"
            )
        )


def _seen_by_folds(command: Command) -> None:
    """Nothing to do: it is a statement, for the journal and whoever watches."""


async def _named(name: str, coroutine: Awaitable[None]) -> None:
    try:
        await coroutine
    except PacelineError as error:
        error.add_note(f"in the {name}")
        raise
    except Exception as error:
        raise ComponentFailed(f"the {name} failed: {type(error).__name__}: {error}") from error


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf; an InvariantError before others, since they may be its consequences."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo = [*error.exceptions, *todo]
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, InvariantError)), leaves[0])
