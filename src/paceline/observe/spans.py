"""Spans: what every rollout did and when, for a timeline of the last steps.

A rollout's time is made of turns: it waits at the turn gate, an engine answers, the environment works until the next
turn is asked for. Memory is bounded: lanes that ended before the last `steps` cuts go, and the oldest beyond
`max_lanes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from paceline.domain.commands import (
    ContinueRollout,
    FinishRun,
    GrantTurn,
    ShipBatch,
    StartRollout,
    UpdateWeights,
)
from paceline.domain.events import (
    BatchShipped,
    EngineJoined,
    EngineLost,
    LoadReported,
    RolloutEnded,
    RunOpened,
    SegmentEnded,
    StepTrained,
    TurnRequested,
    WeightsLoaded,
)
from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.domain.rollout import Ending
from paceline.domain.task import TaskRef
from paceline.observe.fold import Fold, Handler


class Turn(msgspec.Struct):
    """One request of a model call: asked for, let through, answered. Times in seconds of the run's clock."""

    asked: float
    context: int
    """Prompt tokens."""
    granted: float | None = None
    ended: float | None = None
    engine: EngineId = ""
    tokens: int = 0
    """Sampled."""
    cached: int = 0
    """Prompt tokens whose KV the engine still had."""
    versions: tuple[Version, ...] = ()
    error: str = ""
    goes_on: bool = False
    """A further request of the call before it, which was cut or parked: exactly the ids so far, and no more."""


class Lane(msgspec.Struct):
    """One rollout."""

    id: RolloutId
    task: TaskRef
    engine: EngineId
    version: Version
    started: float
    turns: list[Turn]
    ended: float | None = None
    ending: Ending | None = None
    cause: str | None = None
    reward: float | None = None


class Update(msgspec.Struct):
    """One engine loads weights; its turn gate is closed meanwhile."""

    engine: EngineId
    version: Version
    started: float
    ended: float | None = None
    error: str = ""


class Step(msgspec.Struct):
    """One batch: cut, shipped, trained."""

    step: int
    cut: float
    rollouts: int
    shipped: float | None = None
    trained: float | None = None


class Reading(msgspec.Struct):
    """What an engine said about itself."""

    at: float
    running: int
    waiting: int
    kv_usage: float


class Spans(Fold):
    """Keeps the lanes of the last `steps` steps; None keeps all (then `max_lanes` alone bounds them)."""

    def __init__(self, steps: int | None = 4, max_lanes: int = 50_000) -> None:
        self.steps: deque[Step] = deque(maxlen=None if steps is None else steps + 1)
        self.updates: deque[Update] = deque()
        self.readings: dict[EngineId, deque[Reading]] = {}
        self.dropped = 0
        """Lanes that went because there were more than `max_lanes`."""
        self.opened_at = 0.0
        self.now = 0.0
        self._keeps_all = steps is None
        self._max_lanes = max_lanes
        self._open: dict[RolloutId, Lane] = {}
        self._closed: deque[Lane] = deque()
        self._loading: dict[EngineId, Update] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {
            RunOpened: self._run_opened,
            StartRollout: self._start,
            ContinueRollout: self._continue,
            TurnRequested: self._asked,
            GrantTurn: self._granted,
            SegmentEnded: self._answered,
            RolloutEnded: self._ended,
            UpdateWeights: self._update,
            WeightsLoaded: self._loaded,
            LoadReported: self._load,
            EngineJoined: self._joined,
            EngineLost: self._lost,
            ShipBatch: self._cut,
            BatchShipped: self._shipped,
            StepTrained: self._trained,
            FinishRun: self._finish,
        }

    def lanes(self) -> list[Lane]:
        """In order of their start, those still open included."""
        return sorted((*self._closed, *self._open.values()), key=lambda lane: (lane.started, lane.id))

    @property
    def since(self) -> float:
        """From when on every lane is complete."""
        return (
            self.opened_at
            if self._keeps_all or len(self.steps) < (self.steps.maxlen or 0)
            else self.steps[0].cut
        )

    def _run_opened(self, at: float, event: RunOpened) -> None:
        if event.resumed_from is None:
            self.opened_at = at
        if event.recovered:
            return
        for lane in list(self._open.values()):  # they died with the process before
            self._close(lane, self.now, "cancelled", "shutdown")

    def _start(self, at: float, command: StartRollout) -> None:
        self.now = at
        self._open[command.rollout] = Lane(
            command.rollout, command.task, command.engine, command.version, at, []
        )

    def _continue(self, at: float, command: ContinueRollout) -> None:
        if (lane := self._open.get(command.rollout)) is not None:
            lane.engine = command.engine or lane.engine

    def _asked(self, at: float, event: TurnRequested) -> None:
        if (lane := self._open.get(event.rollout)) is not None:
            before = lane.turns[-1] if lane.turns else None
            goes_on = before is not None and event.context_tokens == before.context + before.tokens
            lane.turns.append(Turn(at, event.context_tokens, goes_on=goes_on))

    def _granted(self, at: float, command: GrantTurn) -> None:
        if (lane := self._open.get(command.rollout)) is not None and lane.turns:
            lane.turns[-1].granted = at
            lane.turns[-1].engine = command.engine

    def _answered(self, at: float, event: SegmentEnded) -> None:
        self.now = at
        if (lane := self._open.get(event.rollout)) is not None and lane.turns:
            turn = lane.turns[-1]
            turn.ended = at
            turn.engine = event.engine
            turn.tokens = sum(count for _, count in event.versions)
            turn.cached = event.cached_tokens
            turn.versions = tuple(version for version, _ in event.versions)
            turn.error = event.error or ""

    def _ended(self, at: float, event: RolloutEnded) -> None:
        self.now = at
        if (lane := self._open.get(event.rollout.id)) is not None:
            lane.reward = event.rollout.reward
            self._close(lane, at, event.rollout.outcome.ending, event.rollout.outcome.cause)

    def _close(self, lane: Lane, at: float, ending: Ending, cause: str | None) -> None:
        del self._open[lane.id]
        lane.ended, lane.ending, lane.cause = at, ending, cause
        self._closed.append(lane)
        if len(self._closed) > self._max_lanes:
            self._closed.popleft()
            self.dropped += 1

    def _update(self, at: float, command: UpdateWeights) -> None:
        update = self._loading[command.engine] = Update(command.engine, command.version, at)
        self.updates.append(update)

    def _loaded(self, at: float, event: WeightsLoaded) -> None:
        if (update := self._loading.pop(event.engine, None)) is not None:
            update.ended, update.error = at, event.error or ""

    def _joined(self, at: float, event: EngineJoined) -> None:
        self._loading.pop(event.info.id, None)

    def _lost(self, at: float, event: EngineLost) -> None:
        if (update := self._loading.pop(event.engine, None)) is not None:
            update.ended, update.error = at, event.error

    def _load(self, at: float, event: LoadReported) -> None:
        if event.load is not None:
            readings = self.readings.setdefault(event.engine, deque(maxlen=20_000))
            readings.append(Reading(at, event.load.running, event.load.waiting, event.load.kv_usage))

    def _cut(self, at: float, command: ShipBatch) -> None:
        self.steps.append(Step(command.batch.step, at, len(command.batch.rollouts)))
        if not self._keeps_all:
            self._forget_before(self.since)

    def _forget_before(self, horizon: float) -> None:
        closed, updates = self._closed, self.updates
        while closed and (closed[0].ended or 0.0) < horizon:
            closed.popleft()
        while updates and (updates[0].ended if updates[0].ended is not None else horizon) < horizon:
            updates.popleft()
        for readings in self.readings.values():
            while readings and readings[0].at < horizon:
                readings.popleft()

    def _step(self, number: int) -> Step | None:
        return next((step for step in reversed(self.steps) if step.step == number), None)

    def _shipped(self, at: float, event: BatchShipped) -> None:
        if (step := self._step(event.step)) is not None:
            step.shipped = at

    def _trained(self, at: float, event: StepTrained) -> None:
        if (step := self._step(event.step)) is not None:
            step.trained = at

    def _finish(self, at: float, command: FinishRun) -> None:
        self.now = at
