"""The real core against modelled engines, in virtual time: how an admission controller does on a workload.

    loop = ClosedLoop(FixedCap(24), swe_small(tool_s=6.0), seed=1)
    loop.run(7200)
    loop.goodput(after=600)      tokens a second of rollouts that were not cancelled

There is no trainer: rollouts end, their groups close, and others start. What one rollout does depends on its id and
the seed alone, so that two controllers meet the same rollouts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf
from random import Random

import msgspec

from paceline.core.admission import Admission
from paceline.core.processing import broken_group
from paceline.core.scheduler import Core
from paceline.core.streams import key
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import COMPLETED, CancelCause, Outcome, Rollout
from paceline.testing.engine_model import EngineModel, EngineSpeed, ModelCall
from paceline.testing.script import setup_for, train_env


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """What one rollout does: a first prompt, then turns."""

    prompt: int
    turns: tuple[tuple[float, int, int], ...]
    """(seconds of environment before it, tokens it observes then, tokens it samples); the first observes none."""


Workload = Callable[[Random, float], AgentPlan]
"""(the rollout's random stream, seconds since the start) -> what it does."""


def lognormal(random: Random, median: float, sigma: float) -> float:
    return median * exp(random.gauss(0.0, sigma))


def swe_small(tool_s: float, turns: Callable[[float], float] = lambda _now: 24.0) -> Workload:
    """Short software-engineering agents, after traces of real ones (`tool_s`: median seconds of a slow tool, which
    44% of the calls are; 55% take 0.05 s, 1% a minute or more). About 24 turns, 24k tokens of final context."""

    def plan(random: Random, now: float) -> AgentPlan:
        count = max(1, min(100, round(lognormal(random, turns(now), 0.63))))
        context, made = 2500, []
        for n in range(count):
            kind = random.random()
            if not n:
                wait, observed = 0.0, 0
            else:
                if kind < 0.55:
                    wait = 0.05
                elif kind < 0.99:
                    wait = lognormal(random, tool_s, 0.6)
                else:
                    wait = 60.0 + random.expovariate(1 / 60.0)
                observed = max(1, min(8192, int(lognormal(random, 303.0, 1.3))))
            sampled = max(1, min(4096, int(lognormal(random, 145.0, 1.0))))
            if context + observed + sampled > 32_000:
                break
            context += observed + sampled
            made.append((wait, observed, sampled))
        return AgentPlan(2500, tuple(made))

    return plan


def long_answers(tokens: int, start: int) -> Workload:
    """One turn of `tokens` sampled tokens behind a prompt of `start`."""
    return lambda _random, _now: AgentPlan(start, ((0.0, 0, tokens),))


class _Agent:
    __slots__ = ("calling", "calls", "cause", "command", "context", "left", "plan", "position", "started")

    def __init__(self, command: do.StartRollout, plan: AgentPlan, now: float) -> None:
        self.command = command
        self.plan = plan
        self.context = plan.prompt
        self.position = 0
        self.left = 0
        self.calling: EngineId | None = None
        self.calls = 0
        self.cause: CancelCause | None = None
        self.started = now


@dataclass(slots=True)
class Sample:
    """One reading, every `poll_s`."""

    at: float
    cap: int
    active: int
    parked: int
    usage: float
    working_tokens: int
    good_tokens: int
    """Sampled so far by rollouts that ended and were not cancelled."""
    sampled: int
    hits: int
    queries: int
    preemptions: int


@dataclass(slots=True)
class LoopTrace:
    """What happened."""

    samples: list[Sample] = field(default_factory=list)
    good_tokens: int = 0
    wasted_tokens: int = 0
    """Sampled by rollouts that were cancelled."""
    completed: int = 0
    cancelled: list[float] = field(default_factory=list)
    parked: list[float] = field(default_factory=list)
    notes: list[tuple[float, int, str]] = field(default_factory=list)


class ClosedLoop:
    """One core, one or more modelled engines, one workload."""

    def __init__(
        self,
        admission: Admission,
        workload: Workload,
        *,
        seed: int = 0,
        speed: EngineSpeed | None = None,
        engines: int = 1,
        group_size: int = 8,
        poll_s: float = 5.0,
        metrics: bool = True,
        segment_tokens: int | None = None,
        park: bool = True,
    ) -> None:
        self.admission = admission
        self.trace = LoopTrace()
        self.now = 0.0
        self._workload = workload
        self._seed = seed
        self._poll_s = poll_s
        self._metrics = metrics
        speed = speed or EngineSpeed()
        setup = setup_for(
            train_env(group_size=group_size),
            batch=10**7,
            lag=1,
            max_steps=10**6,
            dead_group_limit=10**9,
            seed=seed,
        )
        setup = msgspec.structs.replace(setup, segment_tokens=segment_tokens, park=park)
        self.core = Core(setup, admission)
        self.engines = {f"e{n}": EngineModel(speed) for n in range(engines)}
        self.agents: dict[RolloutId, _Agent] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._post(on.RunOpened("loop", seed))
        for name in self.engines:
            kv = speed.kv_tokens if metrics else None
            self._post(on.EngineJoined(EngineInfo(name, kv, speed.max_model_len), 0))
        self._at(0.0, self._poll)

    # ── running ──

    def run(self, until: float) -> LoopTrace:
        """Go on until this many virtual seconds."""
        heap = self._heap
        while True:
            due = heap[0][0] if heap else inf
            engine_due = min(e.next_at() for e in self.engines.values())
            at = min(due, engine_due)
            if at > until:
                self.now = until
                return self.trace
            self.now = max(self.now, at)
            if engine_due <= due:
                for name, engine in self.engines.items():
                    if engine.next_at() <= self.now:
                        for call in engine.advance(self.now):
                            self._call_done(name, call)
            else:
                heapq.heappop(heap)[2]()

    def goodput(self, after: float = 0.0) -> float:
        """Tokens a second of rollouts that were not cancelled, from `after` on."""
        first = next(s for s in self.trace.samples if s.at >= after)
        last = self.trace.samples[-1]
        return (last.good_tokens - first.good_tokens) / max(1e-9, last.at - first.at)

    def _post(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            action = getattr(self, f"_do_{type(command).__name__}", None)
            if action is not None:
                action(command)

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (seconds, self._order, action))

    def _poll(self) -> None:
        trace = self.trace
        states = self.core.fleet.engines()
        loads = {}
        for name, engine in self.engines.items():
            for call in engine.advance(self.now):
                self._call_done(name, call)
            loads[name] = engine.load()
            self._post(on.LoadReported(name, loads[name] if self._metrics else None))
        trace.samples.append(
            Sample(
                at=self.now,
                cap=self.core.fleet.cap(),
                active=sum(s.active for s in states),
                parked=sum(s.parked for s in states),
                usage=max(load.kv_usage for load in loads.values()),
                working_tokens=sum(s.working_tokens for s in states),
                good_tokens=trace.good_tokens,
                sampled=sum(load.generated_tokens for load in loads.values()),
                hits=sum(load.prefix_hits for load in loads.values()),
                queries=sum(load.prefix_queries for load in loads.values()),
                preemptions=sum(load.preemptions for load in loads.values()),
            )
        )
        self._at(self.now + self._poll_s, self._poll)

    # ── rollouts ──

    def _do_StartRollout(self, command: do.StartRollout) -> None:
        rollout = command.rollout
        plan = self._workload(Random(key(self._seed, "agent", *rollout)), self.now)
        agent = self.agents[rollout] = _Agent(command, plan, self.now)
        self._next_turn(agent)

    def _next_turn(self, agent: _Agent) -> None:
        if agent.position == len(agent.plan.turns):
            self._at(self.now, lambda: self._end(agent, COMPLETED))
            return
        wait, observed, sampled = agent.plan.turns[agent.position]

        def ask() -> None:
            if agent.cause is None:
                agent.context += observed
                agent.left = sampled
                self._post(on.TurnRequested(agent.command.rollout, agent.context, sampled))

        self._at(self.now + wait, ask)

    def _do_GrantTurn(self, command: do.GrantTurn) -> None:
        agent = self.agents[command.rollout]
        agent.calling = command.engine
        agent.calls += 1
        tokens = agent.left if command.max_tokens is None else min(agent.left, command.max_tokens)
        shared = ("group", command.rollout.group) if agent.position == 0 else None
        self.engines[command.engine].submit(command.rollout, agent.context, tokens, self.now, shared)

    def _call_done(self, name: EngineId, call: ModelCall, finish: str = "length") -> None:
        agent = self.agents[call.key]  # type: ignore[index]
        rollout = agent.command.rollout
        agent.calling = None
        agent.context += call.sampled
        agent.left -= call.sampled
        versions = ((0, call.sampled),) if call.sampled else ()
        over = agent.left <= 0
        finish = "stop" if over else finish
        if over:
            agent.position += 1
        self._post(
            on.SegmentEnded(rollout, name, versions, finish, call.cached, self.now - call.started)  # type: ignore[arg-type]
        )
        if agent.cause is not None:
            return
        if over:
            self._next_turn(agent)
        else:
            self._post(on.TurnRequested(rollout, agent.context, agent.left))

    def _do_ParkRollout(self, command: do.ParkRollout) -> None:
        self.trace.parked.append(self.now)
        self._abort_soon(self.agents[command.rollout])

    def _do_CancelRollout(self, command: do.CancelRollout) -> None:
        agent = self.agents[command.rollout]
        agent.cause = command.cause
        self.trace.cancelled.append(self.now)
        self._abort_soon(agent)
        self._at(self.now, lambda: self._end(agent, Outcome("cancelled", command.cause, command.reason)))

    def _abort_soon(self, agent: _Agent) -> None:
        number = agent.calls

        def abort() -> None:
            if agent.calling is not None and agent.calls == number:
                name = agent.calling
                for call in self.engines[name].advance(self.now):
                    self._call_done(name, call)
                stopped = self.engines[name].abort(agent.command.rollout, self.now)
                if stopped is not None:
                    self._call_done(name, stopped, "abort")

        self._at(self.now, abort)

    def _end(self, agent: _Agent, outcome: Outcome) -> None:
        command = agent.command
        if command.rollout not in self.agents:
            return
        del self.agents[command.rollout]
        flight = self.core.flights[command.rollout]
        if outcome.ending == "cancelled":
            self.trace.wasted_tokens += flight.sampled
        else:
            self.trace.good_tokens += flight.sampled
            self.trace.completed += 1
        rollout = Rollout(
            id=command.rollout,
            task=command.task,
            outcome=outcome,
            reward=0.0 if outcome.ending == "completed" else None,
            started=agent.started,
            ended=self.now,
        )
        self._post(on.RolloutEnded(rollout))

    def _do_ProcessGroup(self, command: do.ProcessGroup) -> None:
        result = broken_group(command.group, "nobody trains here")
        self._at(self.now, lambda: self._post(on.GroupProcessed(result)))

    def _do_NoteCap(self, command: do.NoteCap) -> None:
        self.trace.notes.append((self.now, command.cap, command.reason))
