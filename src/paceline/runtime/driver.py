"""The loop that everything hangs on: events to the core, its commands to the world.

    rollout tasks ─┐                       ┌─▶ start / cancel a rollout task, open a turn gate
    engine updates ├─▶ inbox ─▶ core.handle ─▶ journal, folds ─▶ perform ─┼─▶ process a group
    watcher, loads ┘     (inside `post`, or                               ├─▶ pack and ship, in order
                          in slices of 2 ms)                              └─▶ update an engine, save, wake

Events are drained inside `Inbox.post` or by a plain callback, not by a task that is switched to: a completion costs the
same at 64 and at 16,384 in flight. So a command may be carried out in the task that it is about. Draining yields every
2 ms, so that a burst of completions cannot keep the loop from its sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from paceline.core.packing import PackSettings, pack_as
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import EngineBusy, EngineUnavailable, InvariantError, PacelineError, said_by
from paceline.ports import BatchSink, Engine, Journal, PolicySource
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.model import Launch
from paceline.runtime.offload import SLICE_S, Offload, is_cancelled
from paceline.runtime.processor import Processor
from paceline.runtime.room import Room
from paceline.runtime.runner import RolloutRunner
from paceline.runtime.starts import Starts
from paceline.runtime.watch import TrainerWatch

_Decision: TypeAlias = tuple[float, Event, Sequence[Command]]

_UNDER_WAY = frozenset({do.GrantTurn, do.ParkRollout})
"""Commands that let a rollout that runs go on, or take it off its engine."""


class Fold(Protocol):
    """Something that watches the run: it sees every decision, in order, as it is made."""

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None: ...


class CheckpointStore(Protocol):
    """Where the core's own state is kept."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write durably and atomically; called in a worker thread."""
        ...


class ComponentFailed(PacelineError):
    """A background part of the run raised something unexpected; its cause is chained."""


class Driver:
    """Runs one core against the world until it finishes."""

    def __init__(
        self,
        core: Core,
        *,
        inbox: Inbox,
        gates: Gates,
        runner: RolloutRunner,
        engines: Mapping[EngineId, Engine],
        processor: Processor,
        sink: BatchSink,
        policy: PolicySource,
        journal: Journal,
        checkpoints: CheckpointStore,
        packing: PackSettings,
        offload: Offload,
        folds: Sequence[Fold] = (),
        clock: Callable[[], float] | None = None,
        step_limit_s: float = float("inf"),
        slice_s: float = SLICE_S,
        revive: Callable[[EngineId], Coroutine[Any, Any, on.EngineJoined]] | None = None,
        durable_first: bool = False,
        room: Room | None = None,
    ) -> None:
        """`slice_s`: longest stretch of draining; infinite where runs must repeat, since it is measured in real time.

        `step_limit_s`: seconds the trainer may owe an acknowledgement, or the weights of an acknowledged step.

        `revive` gets a lost engine back, and returns when it is; without it none comes back.

        `durable_first`: no command is carried out, and no fold is told, before the journal has flushed the record. All
        but what only concerns a rollout under way: its turns and its parking.

        `room` has batches and checkpoints tried again while the disk is full; without it, that ends the run.
        """
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
        self._slice_s = slice_s
        # Commands may be carried out inside an environment's task: what it has set in its context stays its own.
        self._context = copy_context()
        self._loop = asyncio.get_running_loop()
        self.clock = clock or self._loop.time
        self._inbox = inbox
        self._gates = gates
        self._runner = runner
        self._revive = revive
        self._held: deque[_Decision] | None = deque() if durable_first else None
        """What was decided and is not durable yet; None where that is not waited for."""
        self._holds = asyncio.Event()
        self._insist = _once if room is None else room.insist
        self._ships: asyncio.Queue[do.ShipBatch] = asyncio.Queue()
        self._finish: asyncio.Future[do.FinishRun] = self._loop.create_future()
        self._failure: BaseException | None = None
        self._beside: dict[asyncio.Task[None], None] = {}
        """Tasks that nobody waits for when the run has ended; in order, so that runs repeat."""
        self._background: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self._tasks = asyncio.TaskGroup()
        self._rolling: dict[RolloutId, asyncio.Task[None]] = {}
        """Tasks of the rollouts. In the group each would take another callback when it ends."""
        self._trainer = TrainerWatch(step_limit_s, self.fail, trained=core.trained)
        self._starts = Starts(self._begin_rollout, self._finish.done)
        self._perform: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(do.NOTES, _seen_by_folds),
            do.StartRollout: self._starts.add,
            do.ContinueRollout: self._starts.add,
            do.GrantTurn: gates.open,
            do.CancelRollout: self._cancel_rollout,
            do.ParkRollout: self._park_rollout,
            do.ProcessGroup: self._process_group,
            do.UpdateWeights: self._update_weights,
            do.ReviveEngine: self._revive_engine,
            do.ShipBatch: self._ships.put_nowait,
            do.SaveCheckpoint: self._save_checkpoint,
            do.WakeAt: self._set_alarm,
            do.FinishRun: self._finish_run,
        }

    # ── the run ──

    def beside(self, name: str, coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something for as long as the run lasts; if it fails, the run fails and names it."""
        self._background.append((name, coroutine))

    async def run(
        self,
        opened: on.RunOpened,
        joined: Sequence[on.EngineJoined],
        *,
        ended: Sequence[Rollout] = (),
        owed: Sequence[do.ProcessGroup | do.ShipBatch] = (),
    ) -> do.FinishRun:
        """Run to the end. Raises what ended the run when that was an error, the first of several.

        A recovered run has attempts that its earlier life left under way: `ended` are their records. `owed` was
        commanded then and never answered, and is carried out now.
        """
        if self.core.cut > self.core.trained:  # batches of an earlier life that the trainer trains again
            self._trainer.shipped(self.core.cut)
        try:
            async with self._tasks as tasks:
                for name, make in (
                    ("batch shipper", self._ship_batches),
                    ("policy watcher", self._watch_policy),
                    *((("journal", partial(self._let_go, self._held)),) if self._held is not None else ()),
                    *self._background,
                ):
                    self._set_beside(tasks.create_task(self._guarded(name, make), name=name))
                tasks.create_task(self._stand_for_rollouts(), name="rollouts")
                self._inbox.post(opened)
                for rollout in ended:
                    self._inbox.post(on.RolloutEnded(rollout))
                for command in owed:
                    self._perform[type(command)](command)
                for event in joined:
                    self._inbox.post(event)
                self._inbox.on_event(self._decide, self._slice_s)
                self._runner.on_stuck = self.fail
                self._runner.on_continued = self._inbox.post
                # For as long as a rollout goes on, also while the run is being stopped.
                self._runner.hears_signals = True
                self._runner.is_sole_canceller = True
                try:
                    finish = await self._finish
                finally:
                    self._runner.is_sole_canceller = False
                for task in list(self._beside):
                    task.cancel()
        except BaseExceptionGroup as group:
            cause = self._failure or first_cause(group)
            raise cause from cause.__cause__
        finally:
            self._trainer.close()
            last = [] if self._failure is None else [_failed(self.clock(), self._failure)]
            try:
                for decision in last:
                    self._journal.append(*decision)
                await self._flush()
            finally:
                self._tell_last(last)
        return finish

    def _tell_last(self, last: Sequence[_Decision]) -> None:
        """Tell the folds of a run that failed what they were not told yet."""
        try:
            for decision in (*(self._held or ()), *last):
                for fold in self._folds:
                    fold.apply(*decision)
        except Exception as failure:
            if self._failure is None:
                raise
            self._failure.add_note(f"and that it failed could not be told: {said_by(failure)}")

    def fail(self, error: BaseException) -> None:
        """End the run with this cause, unless it has ended: the first cause counts."""
        if not self._finish.done():
            self._failure = error
            self._finish.set_exception(error)

    def when_failing(self, tell: Callable[[BaseException], None]) -> None:
        """Call `tell` as soon as an error, or a cancellation, ends the run: work is still being stopped then."""

        def ended(finish: asyncio.Future[do.FinishRun]) -> None:
            if finish.cancelled():
                tell(asyncio.CancelledError())
            elif self._failure is not None:
                tell(self._failure)

        self._finish.add_done_callback(ended)

    async def _flush(self) -> None:
        try:
            await self._journal.flush()
        except OSError as error:
            if self._failure is None:
                raise PacelineError(f"the end of the journal cannot be written: {error}") from error
            self._failure.add_note(f"and the end of the journal could not be written: {error}")

    def _decide(self, event: on.Event) -> None:
        if self._failure is not None:
            return  # of what is being stopped there is nothing left to decide
        self._starts.decide()
        at = self.clock()
        try:
            try:
                commands = self.core.handle(event, at)
            except Exception:
                self._journal.append(at, event, ())  # what ended the run is its last record
                raise
            self._journal.append(at, event, commands)
            if self._held is None:
                for fold in self._folds:
                    fold.apply(at, event, commands)
                for command in commands:
                    self._perform[type(command)](command)
            else:
                self._hold(self._held, (at, event, commands))
        except Exception as error:
            # The core refused an event, or a command could not be carried out: nobody can go on from here.
            self.fail(error)

    # ── durable first ──

    def _hold(self, held: deque[_Decision], decision: _Decision) -> None:
        held.append(decision)
        self._holds.set()
        for command in decision[2]:
            # A rollout under way does not pay for the disk at each of its turns; nor could it end with a grant open.
            if type(command) in _UNDER_WAY:
                self._perform[type(command)](command)

    async def _let_go(self, held: deque[_Decision]) -> None:
        """Carry out in order what has become durable. One flush serves all that were decided before it."""
        while True:
            await self._holds.wait()
            self._holds.clear()
            count = len(held)
            await self._journal.flush()
            for _ in range(count):
                at, event, commands = held.popleft()
                for fold in self._folds:
                    fold.apply(at, event, commands)
                for command in commands:
                    if type(command) not in _UNDER_WAY:
                        self._perform[type(command)](command)
            if held:
                self._holds.set()

    # ── commands ──

    def _begin_rollout(self, command: Launch) -> None:
        task = self._loop.create_task(self._roll_out(command), context=self._context.copy())
        self._rolling[command.rollout] = task

    async def _roll_out(self, command: Launch) -> None:
        try:
            rollout = await self._runner.run(command)
            self._gates.forget(command.rollout)
            self._inbox.post(on.RolloutEnded(rollout))
        except BaseException as error:  # it answers with a record, whatever happens: this is our bug
            if isinstance(error, asyncio.CancelledError) and self._finish.done():
                raise
            self._failed("rollout runner", error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._rolling.pop(command.rollout, None)

    async def _stand_for_rollouts(self) -> None:
        """Stands for the rollouts in the group of tasks: ends when the run has ended and they have; when it is cancelled, they
        are."""
        waits_for: Sequence[asyncio.Future[Any]] = [self._finish]
        while waits_for:
            try:
                await asyncio.wait(waits_for)
            except asyncio.CancelledError as error:
                # By code of an environment, which may cancel whatever task it finds, unless the run has ended.
                if not self._finish.done():
                    self._failed("rollouts", error)
                for task in self._rolling.values():
                    task.cancel()
            waits_for = [task for task in self._rolling.values() if not task.done()]

    def _cancel_rollout(self, command: do.CancelRollout) -> None:
        rollout = command.rollout
        self._starts.once_begun(rollout, partial(self._runner.cancel, rollout, command.cause))

    def _park_rollout(self, command: do.ParkRollout) -> None:
        self._runner.park(command.rollout)

    def _process_group(self, command: do.ProcessGroup) -> None:
        name = "group processor"
        if not self._processor.process_soon(command.group, self._inbox.post, partial(self._failed, name)):
            self._spawn(name, lambda: self._processor.process(command.group))

    def _update_weights(self, command: do.UpdateWeights) -> None:
        async def update() -> on.WeightsLoaded:
            began = self.clock()
            error, is_outage = None, False
            try:
                await self._engines[command.engine].update_weights(command.version, command.path)
            except PacelineError as failure:
                error, is_outage = str(failure), _hangs(failure)
            return on.WeightsLoaded(command.engine, command.version, self.clock() - began, error, is_outage)

        # An engine may take minutes over it: the end of the run does not wait for weights that nobody will sample.
        self._set_beside(self._spawn("weight update", update))

    def _revive_engine(self, command: do.ReviveEngine) -> None:
        if self._revive is not None:
            # It may try for ever: the end of the run does not wait for an engine that is gone.
            self._set_beside(
                self._spawn(f"reviver of {command.engine}", partial(self._revive, command.engine))
            )

    def _save_checkpoint(self, command: do.SaveCheckpoint) -> None:
        async def save() -> on.CheckpointSaved:
            began = self.clock()
            await self._journal.flush()
            save = partial(self._offload.run, self._checkpoints.save, command.step, command.state)
            await self._insist("the checkpoint", save)
            return on.CheckpointSaved(command.step, self.clock() - began)

        self._spawn("saving of the checkpoint", save)

    def _set_alarm(self, command: do.WakeAt) -> None:
        delay = max(0.0, command.at - self.clock())
        self._loop.call_later(delay, self._inbox.post, on.TimerFired(), context=self._context)

    def _finish_run(self, command: do.FinishRun) -> None:
        if not self._finish.done():
            self._finish.set_result(command)

    def _set_beside(self, task: asyncio.Task[None]) -> None:
        self._beside[task] = None
        task.add_done_callback(self._beside.pop)

    def _spawn(self, name: str, make: Callable[[], Coroutine[Any, Any, Event]]) -> asyncio.Task[None]:
        async def answer() -> None:
            self._inbox.post(await make())

        return self._tasks.create_task(self._guarded(name, answer), context=self._context.copy())

    async def _guarded(self, name: str, make: Callable[[], Awaitable[None]]) -> None:
        """Whatever fails in the background ends the run at once, by its name; the rest is then stopped."""
        try:
            await make()
        except asyncio.CancelledError as error:
            if is_cancelled() and self._finish.done():
                raise
            # An answer that never comes would be waited for until the end of time: code of an environment may cancel
            # whatever task it finds.
            self._failed(name, error)
        except Exception as error:
            self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> None:
        if isinstance(error, PacelineError):
            error.add_note(f"in the {name}")
            self.fail(error)
            return
        failure = ComponentFailed(f"the {name} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self.fail(failure)

    # ── what runs beside ──

    async def _ship_batches(self) -> None:
        """Pack and ship one batch after the other: the trainer must find them in order."""
        while True:
            batch = (await self._ships.get()).batch
            began = self.clock()
            packed = await self._offload.run(pack_as, self._packing, batch)
            # What a trainer can see must not be forgotten: a resumed run would make another batch of this number.
            await self._journal.flush()
            packed_at = self.clock()
            shipped = await self._insist(f"batch {batch.step}", partial(self._sink.ship, packed))
            self._trainer.shipped(batch.step)
            took = (packed_at - began, self.clock() - packed_at)
            self._inbox.post(on.BatchShipped(batch.step, shipped.nbytes, *took, shipped.digests))

    async def _watch_policy(self) -> None:
        while True:
            published = await self._policy.next()
            if published.trained_step is not None:
                self._trainer.acknowledged(published.trained_step)
                self._inbox.post(on.StepTrained(published.trained_step, published.metrics))
            if published.version is not None:
                self._trainer.published(published.version)
                self._inbox.post(on.PolicyPublished(published.version, published.path))


def _failed(at: float, error: BaseException) -> _Decision:
    """The journal's last word on a life that an error ended, whatever becomes of the status file."""
    text = said_by(error)
    status: Literal["stopped", "failed"] = "stopped" if getattr(error, "is_stop", False) else "failed"
    return at, on.RunFailed(text), (do.FinishRun(status, text),)


async def _once(_what: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
    return await attempt()


def _hangs(error: PacelineError) -> bool:
    return isinstance(error, EngineUnavailable) and not isinstance(error, EngineBusy)


def _seen_by_folds(command: Command) -> None:
    """Nothing to do: it is a statement, for the journal and whoever watches."""


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
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
