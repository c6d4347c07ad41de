"""A scripted world around the core: no asyncio, no engine, no environment, just a heap of things to come.

    world = World(setup_for(batch=4), Script(seconds=lambda rollout, task: 2.0), engines=2, cap=8)
    trace = world.run(until=100)
    assert trace.batches[0].step == 1

It performs every command and answers it as `docs/architecture.md` says, with durations, endings and rewards from a
`Script`. Times are virtual seconds. The same seed gives the same trace, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from paceline.core.admission import Admission, FixedCap
from paceline.core.advantages import Algorithm, builtin
from paceline.core.parts import lost_rollout, may_go_on
from paceline.core.processing import GroupRules, broken_group, process_group
from paceline.core.recovery import Recovery
from paceline.core.scheduler import Core
from paceline.core.scheduling import Scheduling
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import GroupResult
from paceline.domain.ids import EngineId, EnvName, RolloutId, Version
from paceline.domain.load import EngineInfo
from paceline.domain.part import Asked, Part, sampled_crc
from paceline.domain.rollout import CancelCause, Finish, Outcome, Rollout, Turn, VersionRuns
from paceline.domain.task import TaskRef
from paceline.testing.script import Plan, Script
from paceline.testing.trace import Trace


class _Running:
    __slots__ = (
        "calling",
        "calls",
        "cause",
        "command",
        "most",
        "part",
        "plan",
        "position",
        "record",
        "requests",
        "sampled_crc",
        "segments",
        "span",
        "turns",
    )

    def __init__(
        self, command: do.StartRollout | do.ContinueRollout, plan: Plan, record: Sequence[Part] = ()
    ) -> None:
        self.command = command
        self.record = record
        """What earlier lives have left of it."""
        self.requests = 0
        """Engine requests that sampled something."""
        self.sampled_crc = 0
        self.plan = plan
        self.position = 0
        self.turns: list[Turn] = []
        self.calling: tuple[EngineId, float] | None = None
        self.calls = 0
        self.part: tuple[tuple[Version, int], ...] = ()
        """What earlier segments of the turn under way have sampled."""
        self.segments = 0
        self.most = 0
        """Tokens that the call under way may sample."""
        self.span = 0
        self.cause: CancelCause | None = None


class World:
    """Drives one core. `kv_tokens`: what each engine says that its KV cache holds. `watch` is called after every decision with (world, event, commands).

    With `state`, the core goes on from a checkpoint, and the trainer from step `trained` (the checkpoint's own, when
    left out): batches that were shipped and not trained are trained first. With `recovery` it goes on from a journal;
    `rollouts` are the records that it wants, and `parts` what is left of those that were under way: each goes on if its
    environment is in `replayable`, or has heard no answer yet. What is sampled is in `trace.parts`.
    """

    def __init__(
        self,
        setup: CoreSetup,
        script: Script | None = None,
        *,
        engines: int = 1,
        cap: int = 4,
        kv_tokens: int | None = None,
        admission: Admission | None = None,
        scheduling: Scheduling | None = None,
        algorithm: Algorithm | None = None,
        rules: Callable[[EnvName], GroupRules] | None = None,
        state: dict[str, Any] | None = None,
        trained: int | None = None,
        recovery: Recovery | None = None,
        rollouts: Mapping[RolloutId, Rollout] | None = None,
        parts: Mapping[RolloutId, Sequence[Part]] | None = None,
        replayable: Collection[EnvName] = (),
        first_seq: int = 0,
        now: float = 0.0,
        watch: Callable[[World, Event, list[Command]], None] | None = None,
    ) -> None:
        self.setup = setup
        self.script = script or Script()
        self.admission = admission or FixedCap(cap)
        rollouts = rollouts or {}
        if recovery is not None:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(recovery.state(rollouts, {})), strict=False)
        self.resumed = state is not None
        self.core = Core(setup, self.admission, scheduling)
        self.now = now
        self.trace = Trace()
        self.running: dict[RolloutId, _Running] = {}
        self.held: dict[EngineId, Version] = {}
        """What each engine really samples with, whatever the core believes."""
        self.lost: set[EngineId] = set()
        self._kv_tokens = kv_tokens
        self._algorithm = algorithm or builtin("grpo", {})
        self._rules = rules or (lambda env: GroupRules(env=env, seq_len=setup.seq_len))
        self._watch = watch
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._train_free_at = self._ship_free_at = now
        start = 0
        if state is not None:
            start = state["cut"] if trained is None else trained
            kept = None if recovery is None else rollouts
            self.core.restore(state, start, f"weights/v{start}", kept)
        self.core.count_from(first_seq)
        shipping = () if state is None else state.get("shipping", ())
        # Before an engine joins: what waits may be cut at once.
        owed = [step for step in range(start + 1, self.core.cut + 1) if step not in shipping]
        if recovery is None:
            self.post(on.RunOpened("test", setup.seed, start or None))
        else:
            self._recover(recovery, rollouts, start, parts or {}, replayable)
        for number in range(engines):
            self.join(f"e{number}", start)
        for step in owed:
            self._train(step)

    def _recover(
        self,
        recovery: Recovery,
        rollouts: Mapping[RolloutId, Rollout],
        trained: int,
        parts: Mapping[RolloutId, Sequence[Part]],
        replayable: Collection[EnvName],
    ) -> None:
        under_way = recovery.under_way
        goes_on = []
        for left in under_way:
            command = do.StartRollout(left.id, left.task, 0, 0, "", 0)
            record = parts.get(left.id, ())
            self.running[left.id] = _Running(command, Plan(()), record)
            where = (left.task.split, left.task.env)
            is_owed = (
                where[0] == "train" and where not in self.setup.whole_groups and recovery.is_owed(left.id)
            )
            if is_owed and may_go_on(record, is_replayable=where[1] in replayable):
                goes_on.append(left.id)
        for owed in recovery.owed(rollouts, {}):
            getattr(self, f"_do_{type(owed).__name__}")(owed)
        self.post(
            on.RunOpened(
                "test",
                self.setup.seed,
                recovery.cut,
                True,
                recovery.base,
                trained,
                f"weights/v{trained}",
                tuple(goes_on),
            )
        )
        for left in under_way:
            if left.id in goes_on:
                continue
            del self.running[left.id]
            lost = lost_rollout(left.id, left.task, self.now)
            self.trace.ended.append(lost)
            self.post(on.RolloutEnded(lost))

    # ── for tests ──

    def join(self, engine: EngineId, version: Version) -> None:
        """An engine answers, holding `version`."""
        self.held[engine] = version
        self.lost.discard(engine)
        self.post(on.EngineJoined(EngineInfo(engine, self._kv_tokens, None), version))

    def lose(self, engine: EngineId, error: str = "connection refused") -> None:
        """An engine is gone, and with it the calls it was carrying out."""
        self.lost.add(engine)
        called = [r for r in self.running.values() if r.calling is not None and r.calling[0] == engine]
        self.post(on.EngineLost(engine, error))
        for running in called:
            if running.calling is not None:
                self._call_failed(running, error)

    def shut_down(self, why: str = "Ctrl-C") -> None:
        """Someone asks the run to end."""
        self.post(on.ShutdownRequested(why))

    def post(self, event: Event) -> None:
        """Hand one event to the core now and perform what it commands."""
        commands = self.core.handle(event, self.now)
        self.trace.journal.append((self.now, event, commands))
        for command in commands:
            if type(command) not in do.NOTES:
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
        running = self.running[command.rollout] = _Running(command, self._plan(command.rollout, command.task))
        if isfinite(self.script.deadline_s):
            self._later(running, self.script.deadline_s, lambda: self._deadline(running))
        self._next_turn(running)

    def _plan(self, rollout: RolloutId, task: TaskRef) -> Plan:
        if self.script.plan is not None:
            return self.script.plan(rollout, task)
        reward = self.script.reward(rollout, task, self.setup.seed)
        return Plan(((0.0, self.script.seconds(rollout, task)),), reward=reward)

    def _do_ContinueRollout(self, command: do.ContinueRollout) -> None:
        running = self.running[command.rollout]
        running.command, running.plan = command, self._plan(command.rollout, command.task)
        running.requests = command.requests
        if isfinite(self.script.deadline_s):
            left = command.started + command.stood_s + self.script.deadline_s - self.now
            self._later(running, max(0.0, left), lambda: self._deadline(running))
        seconds = self.script.repeat_s(command.rollout)
        self._later(running, seconds, lambda: self._repeat(running, command))

    def _repeat(self, running: _Running, command: do.ContinueRollout) -> None:
        """Take over what its record holds, up to where its environment leaves it, and go on behind that."""
        leaves = self.script.leaves(command.rollout, self.now)
        # A record of a life that was lost may be that of another task, which had the rollout's number then.
        others = [part.turn for part in running.record if part.asked.max_tokens != running.plan.tokens]
        leaves = min([*others, *([] if leaves is None else [leaves])], default=None)
        record = [part for part in running.record if leaves is None or part.turn < leaves]
        for part in record:
            running.part += part.versions
            running.segments += 1
            running.sampled_crc = sampled_crc(part.sampled_ids, running.sampled_crc)
            if part.finish != "abort":
                self._keep_turn(running, part.engine, part.started, part.finish)
        kept = sum(part.tokens for part in record)
        self.post(
            on.RolloutContinued(
                command.rollout,
                kept,
                command.tokens - kept,
                running.position + bool(running.part),
                bool(running.part),
                min([version for part in record for version, _ in part.versions], default=None),
            )
        )
        if running.cause is not None:
            return
        if running.part:
            self._ask(running)
        else:
            self._next_turn(running)

    def _deadline(self, running: _Running) -> None:
        if running.calling is not None:
            self._call_ended(running, running.plan.tokens // 2, "abort", goes_on=False)
        if running.cause is None:
            self._end(
                running, Outcome("truncated", "deadline", f"{self.script.deadline_s:g} s"), scored=False
            )

    def _next_turn(self, running: _Running) -> None:
        if running.position == len(running.plan.turns):
            # Not at once: a rollout without turns would end while its start is still being performed.
            self._later(running, 0.0, lambda: self._end(running, running.plan.outcome))
            return
        wait, _ = running.plan.turns[running.position]
        self._later(running, wait, lambda: self._ask(running))

    def _ask(self, running: _Running) -> None:
        """Ask for the turn, or for the rest of it."""
        done = sum(n for _, n in running.part)
        context = sum(len(t.prompt_ids) + len(t.sampled_ids) for t in running.turns) + 2 + done
        left = running.plan.tokens - done
        self.post(on.TurnRequested(running.command.rollout, context, left))

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
        running.calls += 1
        running.segments += 1
        call, whole, error = running.calls, running.plan.tokens, running.plan.call_error
        left = whole - sum(n for _, n in running.part)
        tokens = left if command.max_tokens is None else min(left, command.max_tokens)
        running.most = tokens
        if left != whole or tokens != whole:
            seconds *= tokens / max(1, whole)

        def come_back() -> None:
            if running.calls != call or running.calling is None:
                return  # parked meanwhile
            if tokens < left:
                self._segment_ended(running, tokens, "length")
            elif error is not None and running.position == len(running.plan.turns) - 1:
                self._call_failed(running, error)
            else:
                self._call_ended(running, tokens, "stop")

        self._later(running, seconds, come_back)

    def _do_ParkRollout(self, command: do.ParkRollout) -> None:
        running = self.running[command.rollout]
        self.trace.parked.append(command)
        if running.calling is None:
            return
        call = running.calls

        def stop() -> None:
            if running.calls == call and running.calling is not None:
                left = running.plan.tokens - sum(n for _, n in running.part)
                self._segment_ended(running, left // 2, "abort")

        self._later(running, self.script.cancel_s(command.rollout), stop)

    def _segment_ended(self, running: _Running, tokens: int, finish: Finish) -> None:
        """A part of a turn is done, and the rest is asked for."""
        assert running.calling is not None
        engine, began = running.calling
        running.calling = None
        versions = self._versions(engine, running.span, tokens)
        self._keep_part(running, engine, began, versions, "abort")
        running.part += versions
        rollout = running.command.rollout
        self.post(on.SegmentEnded(rollout, engine, versions, finish, seconds=self.now - began))
        if running.cause is None and rollout in self.running:
            self._ask(running)

    def _call_failed(self, running: _Running, error: str) -> None:
        self._call_ended(running, 0, "abort", goes_on=False, error=error)
        if running.cause is None:
            self._end(running, Outcome("failed", "engine", error))

    def _call_ended(
        self,
        running: _Running,
        tokens: int,
        finish: Finish,
        *,
        goes_on: bool = True,
        error: str | None = None,
    ) -> None:
        assert running.calling is not None
        engine, began = running.calling
        running.calling = None
        tokens = min(tokens, running.most)
        versions = self._versions(engine, running.span, tokens)
        rollout = running.command.rollout
        self._keep_part(running, engine, began, versions, finish)
        running.part += versions
        self._keep_turn(running, engine, began, finish)
        self.post(
            on.SegmentEnded(
                rollout, engine, versions, finish, seconds=self.now - began, error=error, is_outage=True
            )
        )
        if goes_on and running.cause is None:
            self._next_turn(running)

    def _keep_part(
        self, running: _Running, engine: EngineId, began: float, versions: VersionRuns, finish: Finish
    ) -> None:
        tokens = sum(n for _, n in versions)
        if not tokens:
            return
        self.trace.parts.append(
            Part(
                running.command.rollout,
                running.requests,
                running.position,
                sum(n for _, n in running.part),
                running.position - 1,
                np.array([] if running.part else [1, 2], dtype=np.int32),
                np.full(tokens, 3, dtype=np.int32),
                np.full(tokens, -0.5, dtype=np.float32),
                versions,
                finish,
                Asked(running.plan.tokens),
                engine,
                started=began,
                ended=self.now,
                behind=running.sampled_crc,
            )
        )
        running.requests += 1
        running.sampled_crc = sampled_crc(self.trace.parts[-1].sampled_ids, running.sampled_crc)

    def _keep_turn(self, running: _Running, engine: EngineId, began: float, finish: Finish) -> None:
        tokens = sum(n for _, n in running.part)
        running.turns.append(
            Turn(
                prompt_ids=np.array([1, 2], dtype=np.int32),
                sampled_ids=np.full(tokens, 3, dtype=np.int32),
                logprobs=np.full(tokens, -0.5, dtype=np.float32),
                versions=_merged(running.part),
                extends=running.position > 0,
                finish=finish,
                engine=engine,
                started=began,
                ended=self.now,
                segments=running.segments,
            )
        )
        running.part = ()
        running.segments = 0
        running.position += 1

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
                self._call_ended(running, running.plan.tokens // 2, "abort", goes_on=False)
            self._end(running, Outcome("cancelled", command.cause, command.reason))

        self.at(self.now + self.script.cancel_s(command.rollout), stop)

    def _end(self, running: _Running, outcome: Outcome, *, scored: bool = True) -> None:
        command = running.command
        del self.running[command.rollout]
        if running.part:  # ended between two segments of a turn
            self._keep_turn(running, command.engine, self.now, "abort")
        scored = scored and outcome.ending in ("completed", "truncated")
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
                self._processed(broken_group(group, error), error)
                return
            self._processed(result, None)

        self.at(self.now + self.script.process_s(group.id), process)

    def _processed(self, result: GroupResult, error: str | None) -> None:
        self.trace.results[result.group] = result
        self.post(on.GroupProcessed(result, error=error))

    def _do_ShipBatch(self, command: do.ShipBatch) -> None:
        batch = command.batch
        self.trace.batches.append(batch)
        self.trace.shipped_at.append(self.now)

        def shipped() -> None:
            self.post(on.BatchShipped(batch.step, batch.tokens * 10, 0.0, 0.0))
            self._train(batch.step)

        self._ship_free_at = max(self.now, self._ship_free_at) + self.script.ship_s
        self.at(self._ship_free_at, shipped)

    def _train(self, step: int) -> None:
        self._train_free_at = max(self.now, self._train_free_at) + self.script.train_s(step)
        self.at(self._train_free_at, lambda: self._trained(step))

    def _trained(self, step: int) -> None:
        self.post(on.StepTrained(step, {"loss": 0.0}))
        if self.trace.finish is None:
            self.post(on.PolicyPublished(step, f"weights/v{step}"))

    def _do_UpdateWeights(self, command: do.UpdateWeights) -> None:
        seconds = self.script.load_s(command.engine, command.version)

        def loaded() -> None:
            if command.engine in self.lost:
                error: str | None = "connection refused"
            else:
                error = self.script.load_error(command.engine, command.version)
            if error is None:
                self.held[command.engine] = command.version
            self.post(on.WeightsLoaded(command.engine, command.version, seconds, error))

        self.at(self.now + seconds, loaded)

    def _do_ReviveEngine(self, command: do.ReviveEngine) -> None:
        engine, seconds = command.engine, self.script.revive_s(command.engine)

        def back() -> None:
            if self.core.fleet[engine].out is not None:
                self.join(engine, 0 if engine in self.lost else self.held[engine])

        if isfinite(seconds):
            self.at(self.now + seconds, back)

    # ── the rest ──

    def _do_SaveCheckpoint(self, command: do.SaveCheckpoint) -> None:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(command.state), strict=False)
        self.trace.checkpoints.append((command.step, state))
        self.at(self.now, lambda: self.post(on.CheckpointSaved(command.step, 0.0)))

    def _do_WakeAt(self, command: do.WakeAt) -> None:
        self.at(command.at, lambda: self.post(on.TimerFired()))

    def _do_FinishRun(self, command: do.FinishRun) -> None:
        self.trace.finish = command


def _merged(runs: VersionRuns) -> VersionRuns:
    """Neighbours of one version as one run."""
    merged: list[tuple[Version, int]] = []
    for version, tokens in runs:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + tokens)
        else:
            merged.append((version, tokens))
    return tuple(merged)
