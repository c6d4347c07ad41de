"""A heap of things to come around the production core: its commands are carried out on virtual time.

    simulation = Simulation(core, engines, workload, rules=..., algorithm=...)
    simulation.run(steps=4)

The core gets the events that the asyncio runtime would report, in the order in which it would report them (what happens
at one moment is first in, first out, as on an event loop), so it takes the same decisions at the same times:
`tests/sim/test_parity.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf, isfinite
from typing import Any, Protocol

from paceline.core.advantages import Algorithm
from paceline.core.processing import GroupRules, process_group
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, EnvName, RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import Finish, Outcome
from paceline.sim.collecting import rare_collections
from paceline.sim.engine.calls import Call
from paceline.sim.engine.endpoint import Endpoint
from paceline.sim.faults import FAILED_CALL, Faults
from paceline.sim.plan import Workload
from paceline.sim.records import blank_samples
from paceline.sim.rollouts import SimRollout
from paceline.sim.scoring import ScoringLine
from paceline.sim.siblings import Siblings
from paceline.sim.training import Training
from paceline.sim.world import FaultModel, TrainerModel, WeightsModel


class Fold(Protocol):
    """Something that sees every decision, in order, as it is made."""

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None: ...


class Simulation:
    """One core, and a world of models."""

    def __init__(
        self,
        core: Core,
        engines: Mapping[EngineId, Endpoint],
        workloads: Mapping[EnvName, Workload],
        *,
        algorithm: Algorithm,
        rules: Mapping[EnvName, GroupRules],
        trainer: TrainerModel | None = None,
        weights: WeightsModel | None = None,
        faults: FaultModel | None = None,
        poll_s: float | None = None,
        shared_kv_s: float | None = None,
        scored_at_once: Mapping[EnvName, int] | None = None,
        folds: Sequence[Fold] = (),
        watch: Callable[[Simulation, Event, Sequence[Command]], None] | None = None,
    ) -> None:
        """`poll_s`: seconds between readings of an engine's metrics; None reads none. `shared_kv_s`: engines share a pool of KV, and bringing a token of it takes this long; None: each has its
        own. `scored_at_once`: by environment; one without has as many places as it needs. `watch` is called after every decision, when its commands were given out."""
        self.core = core
        self.engines = dict(engines)
        self.now = 0.0
        self.finish: do.FinishRun | None = None
        self.events = 0
        """Events that the core has handled."""
        self.running: dict[RolloutId, SimRollout] = {}
        self.lost: set[EngineId] = set()
        self.lives = dict.fromkeys(self.engines, 0)
        """How often each engine has been lost."""
        self.workloads = workloads
        self._algorithm = algorithm
        self._rules = rules
        self._faults = Faults(faults, core.setup.seed)
        self._training = Training(self, trainer or TrainerModel(), weights or WeightsModel(), self._faults)
        self._shared_kv_s = shared_kv_s
        self._lines = {
            env: ScoringLine(places, self._score) for env, places in (scored_at_once or {}).items()
        }
        self._folds = tuple(folds)
        self._watch = watch
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._order = 0
        self._asks: SimRollout | None = None
        """Whose request for a turn is being handled."""
        self._armed = dict.fromkeys(self.engines, inf)
        """When each engine is in the heap for, the earliest; inf: not at all."""
        self._performers: dict[type, Callable[[Any], None] | None] = {
            kind: getattr(self, f"_do_{kind.__name__}", None)
            for kind in vars(do).values()
            if isinstance(kind, type)
        }
        self._performers |= {do.ShipBatch: self._training.ship, do.UpdateWeights: self._training.update}
        block = next(iter(self.engines.values())).speed.block
        self._block = block
        self._siblings = Siblings(block)
        self._post(on.RunOpened("simulation", core.setup.seed))
        for name, engine in self.engines.items():
            self._post(on.EngineJoined(self._info(name), engine.version))
        for name, at in zip(self.engines, self._faults.model.engine_lost_at_s, strict=False):
            self.at(at, self._lose, name)
        if poll_s is not None:
            for name in self.engines:
                self._poll(name, poll_s)

    # ── time ──

    def at(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        """Do something at a virtual time."""
        self._order += 1
        heappush(self._heap, (seconds, self._order, action, args))

    def soon(self, action: Callable[..., None], *args: Any) -> None:
        """Do something now, after what is to be done now already."""
        self._soon.append((action, args))

    def run(self, *, until: float = inf, steps: int | None = None, events: int | None = None) -> None:
        """Go on until virtual time reaches `until`, the trainer has taken `steps` steps, the core has handled `events`
        events, the run has finished, or nothing is left to come."""
        with rare_collections():
            self._run(until, steps, events)

    def _run(self, until: float, steps: int | None, events: int | None) -> None:
        heap, soon, training = self._heap, self._soon, self._training
        most_steps = steps if steps is not None else 1 << 62
        most_events = events if events is not None else 1 << 62
        while self.finish is None and training.trained < most_steps and self.events < most_events:
            if soon:
                action, args = soon.popleft()
                action(*args)
            elif not heap:
                return
            elif heap[0][0] > until:
                self.now = until
                return
            else:
                self.now, _, action, args = heappop(heap)
                action(*args)

    @property
    def trained(self) -> int:
        """Steps that the trainer has taken."""
        return self._training.trained

    def post(self, event: Event) -> None:
        """Report something that happened from outside."""
        self._post(event)

    def shut_down(self, why: str = "asked to") -> None:
        """Someone asks the run to end."""
        self._post(on.ShutdownRequested(why))

    def _post(self, event: Event) -> None:
        self.events += 1
        now = self.now
        commands = self.core.handle(event, now)
        for fold in self._folds:
            fold.apply(now, event, commands)
        performers = self._performers
        for command in commands:
            perform = performers[type(command)]
            if perform is not None:
                perform(command)
        if self._watch is not None:
            self._watch(self, event, commands)

    # ── rollouts ──

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        plan = self.workloads[command.task.env].plan(command, self.now)
        rollout = self.running[command.rollout] = SimRollout(command, plan, self.now)
        fault = self._faults.of_attempt(command.noise_seed, command.rollout.attempt, len(plan.turns))
        if fault is not None:
            rollout.failure, rollout.failure_at = fault
        wait = plan.start_s + (plan.turns[0][0] if plan.turns else 0.0)
        if wait > 0.0:
            self.at(self.now + wait, self._begin_turn, rollout)
        else:
            self.soon(self._begin_turn, rollout)

    def _begin_turn(self, rollout: SimRollout) -> None:
        if rollout.is_over or rollout.cancelled is not None:
            return
        if rollout.failure is not None and rollout.position >= rollout.failure_at:
            self._end(rollout, rollout.failure)
            return
        rollout.begin_turn()
        self._ask(rollout)

    def _ask(self, rollout: SimRollout) -> None:
        rollout.asked = self.now
        self._asks = rollout
        self._post(on.TurnRequested(rollout.command.rollout, rollout.context, rollout.left))
        self._asks = None

    def _do_GrantTurn(self, command: do.GrantTurn) -> None:
        rollout = self.running[command.rollout]
        if rollout is self._asks:
            self._send(rollout, command)
            return
        # It waits at the gate and must be woken: whoever asks now is at the engine before it.
        rollout.grant = command
        self.soon(self._woken, rollout, command)

    def _woken(self, rollout: SimRollout, command: do.GrantTurn) -> None:
        is_parked = rollout.grant is None
        rollout.grant = None
        if rollout.cancelled is None and not is_parked:
            self._send(rollout, command)
            return
        # Stopped between the grant and its request, which is not sent. The grant is answered all the same.
        self._post(on.SegmentEnded(command.rollout, command.engine, (), "abort"))
        if rollout.cancelled is not None:
            self._end(rollout, Outcome("cancelled", rollout.cancelled))
        else:
            self._ask(rollout)

    def _send(self, rollout: SimRollout, command: do.GrantTurn) -> None:
        waited = self.now - rollout.asked
        rollout.gate_s += waited
        rollout.queued_s += waited
        rollout.engine = command.engine
        rollout.sent = self.now
        if not rollout.segments:
            rollout.turn_started = self.now
        rollout.segments += 1
        left = rollout.left
        most = left if command.max_tokens is None else min(left, command.max_tokens)
        start = None if rollout.versions else rollout.start
        own: tuple[Hashable, ...] = (command.version, rollout.command.rollout)
        if rollout.conversation:
            own = (*own, rollout.conversation)
        call = rollout.call = Call(
            rollout.command.rollout,
            rollout.context,
            most,
            own=own,
            chain=self._siblings.chain(rollout, command.version),
            block=self._block,
            references=self._siblings.references(rollout),
            reusable=None if start is None else start.found,
        )
        if self._faults.model.call:
            started = rollout.command
            fails_in_s = self._faults.of_call(
                started.noise_seed, started.rollout.attempt, rollout.position, rollout.segments
            )
            if fails_in_s is not None:
                self.at(self.now + fails_in_s, self._failed_call, rollout, call, command.engine)
                return
        if self._shared_kv_s is not None and rollout.segments + rollout.position > 1:
            there = rollout.context if start is None else start.kept
            if there:
                call.restored = min(there, rollout.context - 1)
                self.at(self.now + self._shared_kv_s * there, self._submit, command.engine, rollout, call)
                return
        self._submit(command.engine, rollout, call)

    def _submit(self, name: EngineId, rollout: SimRollout, call: Call) -> None:
        if rollout.call is call:
            if name in self.lost:  # while its KV was brought there
                self._call_lost(name, rollout)
                return
            engine = self.engines[name]
            engine.submit(call, self.now)
            self.arm(name, engine)

    def _do_ForgetGroup(self, command: do.ForgetGroup) -> None:
        self._siblings.forget(command.group)

    # ── engines ──

    def arm(self, name: EngineId, engine: Endpoint) -> None:
        """Wake the engine when its next call is due, if that is sooner than was thought."""
        if engine.next_at < self._armed[name]:
            self._armed[name] = engine.next_at
            self._order += 1
            heappush(self._heap, (engine.next_at, self._order, self._engine_due, (name, engine)))

    def _engine_due(self, name: EngineId, engine: Endpoint) -> None:
        if self._armed[name] == self.now:
            self._armed[name] = inf
        if engine.next_at <= self.now:
            for call in engine.run(self.now):
                self._call_done(name, engine, call, "stop")
            if engine.is_still:
                self._training.stands(name)
        self.arm(name, engine)

    def _call_done(self, name: EngineId, engine: Endpoint, call: Call, finish: Finish) -> None:
        rollout = self.running[call.key]  # type: ignore[index]
        rollout.call = None
        now, tokens = self.now, call.sampled
        versions = call.versions(engine.version)
        took = now - rollout.sent
        rollout.model_s += took
        if rollout.segments == 1:
            rollout.turn_cached = call.cached
        rollout.segment(versions, tokens)
        is_cut = rollout.left > 0
        if finish == "stop" and (is_cut or rollout.plan.outcome.cause == "tokens"):
            finish = "length"
        self._post(on.SegmentEnded(rollout.command.rollout, name, versions, finish, call.cached, took))
        if rollout.cancelled is not None:
            return
        if is_cut:
            self._ask(rollout)
            return
        rollout.commit(finish, now)
        self._after_turn(rollout)

    def _after_turn(self, rollout: SimRollout) -> None:
        plan = rollout.plan
        if rollout.position < len(plan.turns):
            wait = plan.turns[rollout.position][0]
            if wait > 0.0:
                self.at(self.now + wait, self._begin_turn, rollout)
            else:
                self._begin_turn(rollout)
        elif plan.score_s > 0.0:
            line = self._lines.get(rollout.command.task.env)
            if line is None:
                self._score(rollout)
            else:
                line.come(rollout)
        else:
            self._end(rollout, plan.outcome)

    def _score(self, rollout: SimRollout) -> None:
        self.at(self.now + rollout.plan.score_s, self._end, rollout, rollout.plan.outcome)

    def _end(self, rollout: SimRollout, outcome: Outcome) -> None:
        if rollout.is_over:
            return
        if rollout.cancelled is not None and outcome.ending != "cancelled":
            return  # cancelled at this very moment; that is on its way
        rollout.is_over = True
        del self.running[rollout.command.rollout]
        if rollout.has_scorer:
            self._lines[rollout.command.task.env].leave(rollout)
        self._post(on.RolloutEnded(rollout.record(outcome, self.now)))

    def _failed_call(self, rollout: SimRollout, call: Call, name: EngineId) -> None:
        if rollout.call is not call:
            return
        rollout.call = None
        seconds = self.now - rollout.sent
        self._post(on.SegmentEnded(rollout.command.rollout, name, (), "abort", 0, seconds, FAILED_CALL))
        if rollout.cancelled is None:
            self._end(rollout, Outcome("failed", "engine", FAILED_CALL))

    # ── cancelling and parking ──

    def _do_CancelRollout(self, command: do.CancelRollout) -> None:
        rollout = self.running.get(command.rollout)
        if rollout is not None:  # else it ended by itself while this was decided
            rollout.cancelled = command.cause
            self.soon(self._stop, rollout, Outcome("cancelled", command.cause))

    def _stop(self, rollout: SimRollout, outcome: Outcome) -> None:
        if rollout.is_over:
            return
        self._abort(rollout)
        self._end(rollout, outcome)

    def _do_ParkRollout(self, command: do.ParkRollout) -> None:
        rollout = self.running.get(command.rollout)
        if rollout is None:
            return
        rollout.grant = None
        if rollout.call is not None:
            self.soon(self._abort_call, rollout, rollout.call)

    def _abort_call(self, rollout: SimRollout, call: Call) -> None:
        if rollout.call is call and rollout.cancelled is None:
            self._abort(rollout)

    def _abort(self, rollout: SimRollout) -> None:
        """Stop the engine request under way, if there is one; its tokens are kept."""
        call, name = rollout.call, rollout.engine
        if call is None:
            return
        engine = self.engines[name]
        self.bring_up(name, engine)
        if rollout.call is not call:
            return  # it had finished at this very moment
        engine.abort(call, self.now)
        self._call_done(name, engine, call, "abort")
        if engine.is_still:
            self._training.stands(name)
        self.arm(name, engine)

    def bring_up(self, name: EngineId, engine: Endpoint) -> None:
        """What is due on an engine at this very moment comes first."""
        if engine.next_at <= self.now:
            for call in engine.run(self.now):
                self._call_done(name, engine, call, "stop")

    # ── training ──

    def _do_ProcessGroup(self, command: do.ProcessGroup) -> None:
        self.soon(self._process, command)

    def _process(self, command: do.ProcessGroup) -> None:
        group = command.group
        result = process_group(group, self._rules[group.task.env], self._algorithm, build=blank_samples)
        self._post(on.GroupProcessed(result))

    # ── engines that are lost ──

    def _info(self, name: EngineId) -> EngineInfo:
        speed = self.engines[name].speed
        return EngineInfo(name, speed.kv_tokens, speed.max_model_len)

    def _lose(self, name: EngineId) -> None:
        if name in self.lost:
            return
        engine = self.engines[name]
        self.bring_up(name, engine)
        self.lost.add(name)
        self.lives[name] += 1
        calls = engine.kill()
        self._armed[name] = inf
        self._post(on.EngineLost(name, "a modelled engine is gone"))
        self._training.lost(name)
        for call in calls:
            rollout = self.running[call.key]  # type: ignore[index]
            if rollout.call is call:
                self._call_lost(name, rollout)

    def _call_lost(self, name: EngineId, rollout: SimRollout) -> None:
        """Its engine is gone, and with it what the call had sampled; the rest of the rollout is not."""
        rollout.call = None
        seconds = self.now - rollout.sent
        self._post(
            on.SegmentEnded(
                rollout.command.rollout, name, (), "abort", 0, seconds, "connection refused", is_outage=True
            )
        )
        if rollout.cancelled is None:
            self._ask(rollout)

    def _do_ReviveEngine(self, command: do.ReviveEngine) -> None:
        seconds = self._faults.model.engine_back_s
        if command.engine in self.lost and isfinite(seconds):
            self.at(self.now + seconds, self._come_back, command.engine)
        elif command.engine not in self.lost:
            self.soon(self._come_back, command.engine)

    def _come_back(self, name: EngineId) -> None:
        engine = self.engines[name]
        if self.core.fleet[name].out is None:
            return
        if name in self.lost:
            self.lost.discard(name)
            engine.version = 0
        self._post(on.EngineJoined(self._info(name), engine.version))

    def _poll(self, name: EngineId, interval_s: float) -> None:
        if name in self.lost:
            self._post(on.LoadReported(name, None))
        else:
            engine = self.engines[name]
            self.bring_up(name, engine)
            self._post(on.LoadReported(name, engine.load(self.now)))
            self.arm(name, engine)
        self.at(self.now + interval_s, self._poll, name, interval_s)

    # ── the rest ──

    def _do_SaveCheckpoint(self, command: do.SaveCheckpoint) -> None:
        self.soon(self._post, on.CheckpointSaved(command.step, 0.0))

    def _do_WakeAt(self, command: do.WakeAt) -> None:
        self.at(max(self.now, command.at), self._post, on.TimerFired())

    def _do_FinishRun(self, command: do.FinishRun) -> None:
        self.finish = command
