"""A scripted world around the core: no asyncio, no engine, no environment, just a heap of things to come.

    world = World(setup_for(batch=4, group_size=2), Script(seconds=lambda r, t: 2.0), engines=2, cap=8)
    trace = world.run(until=100)
    assert trace.batches[0].step == 1

It performs every command and answers it as `docs/architecture.md` says, with durations, endings and rewards from a
`Script`. Times are virtual seconds. The same seed gives the same trace, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import EvalSection
from paceline.core.admission import Admission, FixedCap
from paceline.core.advantages import Algorithm, builtin
from paceline.core.curriculum import Source
from paceline.core.processing import GroupRules, broken_group, process_group
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup, OnStale, TrainSpec
from paceline.core.streams import key, uniform
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, EnvName, RolloutId, Version
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import CancelCause, Finish, Outcome, Rollout, Turn, VersionRuns
from paceline.domain.task import TaskRef


def train_env(
    name: EnvName = "env",
    *,
    tasks: int | None = None,
    group_size: int = 2,
    weight: float = 1.0,
    epochs: int | None = None,
    sampler: str = "sequential",
    max_attempts: int = 1,
    tasks_per_minute: float | None = None,
    on_stale: OnStale = "drop",
) -> TrainSpec:
    """A training environment with `tasks` tasks; None for an endless source."""
    source = Source(name, tasks, weight, "sequential" if sampler == "sequential" else "shuffled", epochs, name)
    return TrainSpec(source, group_size, max_attempts, tasks_per_minute, on_stale)


def setup_for(
    *envs: TrainSpec,
    batch: int | None = 4,
    batch_tokens: int | None = None,
    lag: int = 1,
    max_staleness: int = 8,
    max_steps: int = 4,
    evals: Sequence[EvalSection] = (),
    eval_share: float = 0.25,
    seed: int = 0,
    dead_group_limit: int = 512,
    short_last: bool = True,
    checkpoint_every: int = 1000,
    seq_len: int = 64,
) -> CoreSetup:
    """A core's setup with small defaults; one endless environment with groups of 2 when none is given."""
    return CoreSetup(
        seed=seed,
        max_steps=max_steps,
        train=envs or (train_env(),),
        evals=tuple(evals),
        examples={e.label: e.examples for e in evals},
        lag=lag,
        max_staleness=max_staleness,
        eval_share=eval_share,
        target_rollouts=None if batch_tokens else batch,
        target_tokens=batch_tokens,
        seq_len=seq_len,
        short_last=short_last,
        dead_group_limit=dead_group_limit,
        checkpoint_every=checkpoint_every,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rollout will do, unless it is cancelled: turns of (seconds of environment, seconds of model)."""

    turns: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    tokens: int = 4
    """Tokens of each turn."""
    reward: float | None = 0.0
    outcome: Outcome = Outcome("completed")  # noqa: RUF009 - frozen


def coin(rollout: RolloutId, task: TaskRef, seed: int) -> float:
    """A reward of 0 or 1 that depends on the rollout alone."""
    return float(uniform(key(seed, "reward", rollout.group, rollout.member, rollout.attempt), 0) < 0.5)


@dataclass(frozen=True, slots=True)
class Script:
    """Durations, endings and faults, each a function so that a test says only what it is about."""

    seconds: Callable[[RolloutId, TaskRef], float] = lambda _rollout, _task: 1.0
    """How long the one model call of a rollout takes; `plan` replaces it."""
    reward: Callable[[RolloutId, TaskRef, int], float | None] = coin
    plan: Callable[[RolloutId, TaskRef], Plan] | None = None
    """The whole course of a rollout."""
    cancel_s: Callable[[RolloutId], float] = lambda _rollout: 0.0
    """Seconds until a cancelled rollout has really stopped."""
    load_s: Callable[[EngineId, Version], float] = lambda _engine, _version: 0.0
    load_error: Callable[[EngineId, Version], str | None] = lambda _engine, _version: None
    train_s: Callable[[int], float] = lambda _step: 1.0
    """Seconds of one optimizer step."""
    process_s: float = 0.0
    ship_s: float = 0.0


@dataclass(slots=True)
class Trace:
    """What happened, for assertions."""

    journal: list[tuple[float, Event, list[Command]]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    shipped_at: list[float] = field(default_factory=list)
    evals: list[do.ReportEval] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    launched: list[do.StartRollout] = field(default_factory=list)
    ended: list[Rollout] = field(default_factory=list)
    peak_in_flight: int = 0
    finish: do.FinishRun | None = None

    def commands(self, kind: type) -> list[Any]:
        """Every command of a kind, in order."""
        return [c for _, _, commands in self.journal for c in commands if isinstance(c, kind)]


class _Running:
    __slots__ = ("calling", "cause", "command", "plan", "position", "span", "turns")

    def __init__(self, command: do.StartRollout, plan: Plan) -> None:
        self.command = command
        self.plan = plan
        self.position = 0
        self.turns: list[Turn] = []
        self.calling: tuple[EngineId, float] | None = None
        self.span = 0
        self.cause: CancelCause | None = None


class World:
    """Drives one core. `watch` is called after every decision with (world, event, commands)."""

    def __init__(
        self,
        setup: CoreSetup,
        script: Script | None = None,
        *,
        engines: int = 1,
        cap: int = 4,
        admission: Admission | None = None,
        algorithm: Algorithm | None = None,
        rules: Callable[[EnvName], GroupRules] | None = None,
        state: dict[str, Any] | None = None,
        watch: Callable[[World, Event, list[Command]], None] | None = None,
    ) -> None:
        self.setup = setup
        self.script = script or Script()
        self.core = Core(setup, admission or FixedCap(cap))
        self.now = 0.0
        self.trace = Trace()
        self.running: dict[RolloutId, _Running] = {}
        self.held: dict[EngineId, Version] = {}
        """What each engine really samples with, whatever the core believes."""
        self._algorithm = algorithm or builtin("grpo", {})
        self._rules = rules or (lambda env: GroupRules(env=env, seq_len=setup.seq_len))
        self._watch = watch
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._train_free_at = 0.0
        trained = 0
        if state is not None:
            trained = state["cut"]
            self.core.restore(state, trained)
        self.post(on.RunOpened("test", setup.seed, trained or None))
        for number in range(engines):
            self.join(f"e{number}", trained)

    # ── for tests ──

    def join(self, engine: EngineId, version: Version) -> None:
        """An engine answers, holding `version`."""
        self.held[engine] = version
        self.post(on.EngineJoined(EngineInfo(engine, None, None), version))

    def post(self, event: Event) -> None:
        """Hand one event to the core now and perform what it commands."""
        commands = self.core.handle(event, self.now)
        self.trace.journal.append((self.now, event, commands))
        for command in commands:
            getattr(self, f"_do_{type(command).__name__}")(command)
        self.trace.peak_in_flight = max(self.trace.peak_in_flight, len(self.running))
        if self._watch is not None:
            self._watch(self, event, commands)

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(seconds, self.now), self._order, action))

    def run(self, until: float = 1e9, events: int = 1_000_000) -> Trace:
        """Go on until the run finishes, nothing is left to come, or virtual time reaches `until`."""
        while self._heap and self.trace.finish is None and events > 0:
            if self._heap[0][0] > until:
                self.now = until
                break
            self.now, _, action = heapq.heappop(self._heap)
            action()
            events -= 1
        return self.trace

    # ── rollouts ──

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        self.trace.launched.append(command)
        rollout, task = command.rollout, command.task
        if self.script.plan is not None:
            plan = self.script.plan(rollout, task)
        else:
            reward = self.script.reward(rollout, task, self.setup.seed)
            plan = Plan(((0.0, self.script.seconds(rollout, task)),), reward=reward)
        running = self.running[rollout] = _Running(command, plan)
        self._next_turn(running)

    def _next_turn(self, running: _Running) -> None:
        rollout = running.command.rollout
        if running.position == len(running.plan.turns):
            self._end(running, running.plan.outcome)
            return
        wait, _ = running.plan.turns[running.position]
        context = sum(len(t.prompt_ids) + len(t.sampled_ids) for t in running.turns) + 2
        self._later(running, wait, lambda: self.post(on.TurnRequested(rollout, context, running.plan.tokens)))

    def _later(self, running: _Running, seconds: float, action: Callable[[], None]) -> None:
        """Unless it was cancelled meanwhile."""

        def act() -> None:
            if running.cause is None and running.command.rollout in self.running:
                action()

        self.at(self.now + seconds, act)

    def _do_GrantTurn(self, command: do.GrantTurn) -> None:
        running = self.running[command.rollout]
        _, seconds = running.plan.turns[running.position]
        running.calling = (command.engine, self.now)
        running.span = self.held[command.engine]
        self._later(running, seconds, lambda: self._call_ended(running, running.plan.tokens, "stop"))

    def _call_ended(self, running: _Running, tokens: int, finish: Finish) -> None:
        assert running.calling is not None
        engine, began = running.calling
        running.calling = None
        versions = self._versions(engine, running.span, tokens)
        rollout = running.command.rollout
        running.turns.append(
            Turn(
                prompt_ids=np.array([1, 2], dtype=np.int32),
                sampled_ids=np.full(tokens, 3, dtype=np.int32),
                logprobs=np.full(tokens, -0.5, dtype=np.float32),
                versions=versions,
                extends=running.position > 0,
                finish=finish,
                engine=engine,
                started=began,
                ended=self.now,
            )
        )
        running.position += 1
        self.post(on.SegmentEnded(rollout, engine, versions, finish, seconds=self.now - began))
        if running.cause is None:
            self._next_turn(running)

    def _versions(self, engine: EngineId, began: Version, tokens: int) -> VersionRuns:
        """Half under the version at the start and half under the one at the end, if it changed in between."""
        if not tokens:
            return ()
        if self.held[engine] == began or tokens == 1:
            return ((began, tokens),)
        return ((began, tokens // 2), (self.held[engine], tokens - tokens // 2))

    def _do_CancelRollout(self, command: do.CancelRollout) -> None:
        running = self.running[command.rollout]
        running.cause = command.cause

        def stop() -> None:
            if running.calling is not None:
                self._call_ended(running, running.plan.tokens // 2, "abort")
            self._end(running, Outcome("cancelled", command.cause, command.reason))

        self.at(self.now + self.script.cancel_s(command.rollout), stop)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        command = running.command
        del self.running[command.rollout]
        scored = outcome.ending in ("completed", "truncated")
        rollout = Rollout(
            id=command.rollout,
            task=command.task,
            outcome=outcome,
            turns=tuple(running.turns),
            reward=running.plan.reward if scored else None,
            ended=self.now,
        )
        self.trace.ended.append(rollout)
        self.post(on.RolloutEnded(rollout))

    # ── training ──

    def _do_ProcessGroup(self, command: do.ProcessGroup) -> None:
        group = command.group

        def process() -> None:
            try:
                result = process_group(group, self._rules(group.task.env), self._algorithm)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
                self.post(on.GroupProcessed(broken_group(group, error), error=error))
                return
            self.post(on.GroupProcessed(result))

        self.at(self.now + self.script.process_s, process)

    def _do_ShipBatch(self, command: do.ShipBatch) -> None:
        batch = command.batch
        self.trace.batches.append(batch)
        self.trace.shipped_at.append(self.now)

        def shipped() -> None:
            self.post(on.BatchShipped(batch.step, batch.tokens * 10, 0.0, 0.0))
            begin = max(self.now, self._train_free_at)
            self._train_free_at = begin + self.script.train_s(batch.step)
            self.at(self._train_free_at, lambda: self._trained(batch.step))

        self.at(self.now + self.script.ship_s, shipped)

    def _trained(self, step: int) -> None:
        self.post(on.StepTrained(step, {"loss": 0.0}))
        if self.trace.finish is None:
            self.post(on.PolicyPublished(step, f"weights/v{step}"))

    def _do_UpdateWeights(self, command: do.UpdateWeights) -> None:
        seconds = self.script.load_s(command.engine, command.version)

        def loaded() -> None:
            error = self.script.load_error(command.engine, command.version)
            if error is None:
                self.held[command.engine] = command.version
            self.post(on.WeightsLoaded(command.engine, command.version, seconds, error))

        self.at(self.now + seconds, loaded)

    # ── the rest ──

    def _do_SaveCheckpoint(self, command: do.SaveCheckpoint) -> None:
        self.trace.checkpoints.append((command.step, command.state))
        self.at(self.now, lambda: self.post(on.CheckpointSaved(command.step, 0.0)))

    def _do_WakeAt(self, command: do.WakeAt) -> None:
        self.at(command.at, lambda: self.post(on.TimerFired()))

    def _do_ReportEval(self, command: do.ReportEval) -> None:
        self.trace.evals.append(command)

    def _do_ForgetGroup(self, command: do.ForgetGroup) -> None:
        pass

    def _do_NoteStale(self, command: do.NoteStale) -> None:
        pass

    def _do_FinishRun(self, command: do.FinishRun) -> None:
        self.trace.finish = command
