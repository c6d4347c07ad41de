"""Agents on a real engine: the whole runtime (core, driver, runner, HTTP client) without a trainer, in wall time.

What one rollout does depends on its id and the seed alone, so two controllers meet the same rollouts. Nothing trains:
rollouts end, their groups close, others start, until the time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.config import BatchSection, Limits, SamplingSection
from paceline.core.admission import Admission
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.core.streams import key
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.engines.http import HttpEngine
from paceline.envs.protocol import Context, EndlessTasks, Environment, Model, Result
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.driver import Driver
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.loads import poll_load
from paceline.runtime.offload import Inline
from paceline.runtime.processor import EnvProcessing, GroupProcessor
from paceline.runtime.runner import RolloutRunner
from paceline.sim.plan import RolloutPlan
from paceline.testing.run import MemoryJournal
from paceline.testing.script import setup_for, train_env
from paceline.testing.trainer import ScriptedTrainer
from paceline.tokens import Bridge
from paceline.tokens.tokenizer import ChatTokenizer

PROMPT, TURNS, OBSERVED, SAMPLED, LONGEST = 400, 10.0, 120.0, 20.0, 4000
"""Tokens of the first prompt, median turns, median tokens of a tool's answer and of the model's, longest context."""
MOST_SAMPLED = 256
"""Tokens of a turn, whatever a workload asks for: it would be answered with fewer than its simulation has."""


def _bytes() -> ChatTokenizer:
    """The 256 bytes and no end token: how long a turn is, the workload says."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return ChatTokenizer(tokenizer, "{{ messages }}", name="bytes")


def lognormal(random: Random, median: float, sigma: float) -> float:
    return median * exp(random.gauss(0.0, sigma))


@dataclass(frozen=True, slots=True)
class Shape:
    """What agents do, in tokens: medians but for the first prompt and the limits."""

    prompt: int = PROMPT
    turns: float = TURNS
    observed: float = OBSERVED
    sampled: float = SAMPLED
    most_sampled: int = 128
    """Of one turn."""
    shares_prompt: bool = False
    """Whether the members of a group begin with the same prompt."""


class Agents(Environment):
    """Growing contexts and tool waits, as in traces of software-engineering agents, made small: 55% of the waits are
    0.05 s, 44% have the median `tool_s`, 1% are ten times that."""

    blocking = False
    longest = LONGEST

    def __init__(self, tool_s: float, seed: int, shape: Shape | None = None) -> None:
        self._tool_s, self._seed, self._shape = tool_s, seed, shape or Shape()
        if self._shape.most_sampled > MOST_SAMPLED:
            raise ValueError(f"turns of {self._shape.most_sampled} tokens are cut off at {MOST_SAMPLED}")

    def tasks(self, split: str) -> EndlessTasks:
        return EndlessTasks(lambda index: index, "agents")

    def plan(self, command: do.StartRollout, now: float) -> RolloutPlan:
        """What it will do, for a simulation of it, in which groups share their prompts; ValueError where they do not."""
        shape = self._shape
        if not shape.shares_prompt:
            raise ValueError("in a simulation groups share their prompts, and these do not")
        return RolloutPlan(prompt=shape.prompt, turns=tuple(self._turns(command.rollout)))

    def _turns(self, rollout: RolloutId) -> Iterator[tuple[float, int, int]]:
        """Seconds that the tool before it takes, tokens of its answer, and of the model's."""
        shape, random = self._shape, Random(key(self._seed, "agent", *rollout))
        context = shape.prompt
        for turn in range(max(1, min(40, round(lognormal(random, shape.turns, 0.5))))):
            kind, slow = random.random(), lognormal(random, self._tool_s, 0.6)
            observed = max(1, min(1024, int(lognormal(random, shape.observed, 0.8))))
            sampled = max(1, min(shape.most_sampled, int(lognormal(random, shape.sampled, 0.7))))
            if not turn:
                yield 0.0, 0, sampled
            elif context + observed + sampled > LONGEST:
                return
            else:
                yield 0.05 if kind < 0.55 else slow if kind < 0.99 else 10 * self._tool_s, observed, sampled
                context += observed
            context += sampled

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        random = Random(key(self._seed, "ids", *ctx.rollout))
        shared = Random(key(self._seed, "prompt", ctx.rollout.group)) if self._shape.shares_prompt else random
        ids = [shared.randrange(256) for _ in range(self._shape.prompt)]
        for wait_s, observed, sampled in self._turns(ctx.rollout):
            await ctx.sleep(wait_s)
            ids += [random.randrange(256) for _ in range(observed)]
            ids += (await model.generate(ids, max_tokens=sampled)).token_ids.tolist()
        return Result(reward=0.0)


RULES = GroupRules(env="agents", seq_len=LONGEST)


def setup_of(seed: int) -> CoreSetup:
    """Groups of four, without end: no batch is ever full."""
    return setup_for(
        train_env("agents", group_size=4),
        batch=10**7,
        max_steps=10**6,
        dead_group_limit=10**9,
        seed=seed,
        seq_len=LONGEST,
    )


@dataclass(slots=True)
class Reading:
    """Once a second."""

    at: float
    sampled: int
    """Tokens sampled so far."""
    prompts: int
    cached: int
    active: int
    cap: int
    preemptions: int
    server_cpu_s: float
    server_waited_s: float
    """That the server was ready to compute and had no processor."""


@dataclass(slots=True)
class Watch:
    """A fold that counts, and what a cell is judged by."""

    sampled: int = 0
    prompts: int = 0
    """Prompt tokens of the calls that ended, by the core's count of contexts."""
    cached: int = 0
    wasted: int = 0
    """Tokens of rollouts that were cancelled while the clock ran."""
    parked: int = 0
    ended: int = 0
    preemptions: int = 0
    stopping: bool = False
    readings: list[Reading] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _asked: dict[RolloutId, int] = field(default_factory=dict)
    _tokens: dict[RolloutId, int] = field(default_factory=dict)

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.TurnRequested):
            self._asked[event.rollout] = event.context_tokens
        elif isinstance(event, on.SegmentEnded):
            tokens = sum(count for _, count in event.versions)
            self.sampled += tokens
            self.cached += event.cached_tokens
            self.prompts += self._asked.get(event.rollout, 0)
            self._tokens[event.rollout] = self._tokens.get(event.rollout, 0) + tokens
            if event.error is not None and not self.stopping:
                self.errors.append(event.error)
        elif isinstance(event, on.RolloutEnded):
            tokens = self._tokens.pop(event.rollout.id, 0)
            self._asked.pop(event.rollout.id, None)
            self.ended += 1
            if event.rollout.outcome.ending != "completed" and not self.stopping:
                self.wasted += tokens
        elif isinstance(event, on.LoadReported) and event.load is not None:
            self.preemptions = event.load.preemptions
        for command in commands:
            self.parked += isinstance(command, do.ParkRollout)


class _PausesAtBoundaries(RolloutRunner):
    """What is parked finishes the call that is under way, and is held at the next."""

    def park(self, rollout: RolloutId) -> None:
        pass


async def run_agents(
    engine: HttpEngine,
    admission: Admission,
    *,
    environment: Agents,
    seed: int,
    seconds: float,
    cpu_s: Callable[[], tuple[float, float]],
    poll_s: float,
    pause_at_boundaries: bool = False,
    journal: MemoryJournal | None = None,
) -> Watch:
    """One cell: agents for so many seconds. `cpu_s` reads the CPU time of the server, and how long it waited for one."""
    loop = asyncio.get_running_loop()
    core, watch = Core(setup_of(seed), admission), Watch()
    inbox = Inbox()
    gates = Gates(inbox)
    engines = {engine.info.id: engine}
    runtime = EnvRuntime(
        environment=environment,
        source=environment.tasks("train"),
        limits=Limits(deadline_s=100 * seconds),
        sampling=SamplingSection(max_tokens=MOST_SAMPLED),
        bridge=Bridge(_bytes()),
    )
    began = loop.time()
    kind = _PausesAtBoundaries if pause_at_boundaries else RolloutRunner
    runner = kind({("train", "agents"): runtime}, engines, gates, lambda: loop.time() - began)
    rules = EnvProcessing(RULES, builtin("grpo", {}))
    trainer = ScriptedTrainer()
    driver = Driver(
        core,
        inbox=inbox,
        gates=gates,
        runner=runner,
        engines=engines,
        processor=GroupProcessor({"agents": rules}, Inline()),
        sink=trainer,
        policy=trainer,
        journal=journal or _NoJournal(),
        checkpoints=_NoCheckpoints(),
        packing=BatchSection(seq_len=LONGEST),
        offload=Inline(),
        folds=[watch],
        clock=lambda: loop.time() - began,
    )

    async def poll() -> None:
        await poll_load(engine, inbox.post, interval_s=poll_s)

    async def read() -> None:
        while True:
            now = loop.time() - began
            state = core.fleet.engines()[0] if core.fleet.engines() else None
            watch.readings.append(
                Reading(
                    now,
                    watch.sampled,
                    watch.prompts,
                    watch.cached,
                    state.active if state else 0,
                    core.fleet.cap(),
                    watch.preemptions,
                    *cpu_s(),
                )
            )
            if now >= seconds and not watch.stopping:
                watch.stopping = True
                inbox.post(on.ShutdownRequested("the time is over"))
            await asyncio.sleep(1.0)

    driver.beside("load poll", poll)
    driver.beside("reader", read)
    await driver.run(on.RunOpened("bench", seed), [on.EngineJoined(engine.info, 0)])
    return watch


class _NoJournal(MemoryJournal):
    def append(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        pass


class _NoCheckpoints:
    def save(self, step: int, state: dict[str, Any]) -> None:
        pass


def window(watch: Watch, since: float, until: float) -> dict[str, float]:
    """What happened between two moments. Goodput counts tokens of rollouts that were not cancelled."""
    first = next(r for r in watch.readings if r.at >= since)
    last = next((r for r in watch.readings if r.at >= until), watch.readings[-1])
    wall, cpu = last.at - first.at, last.server_cpu_s - first.server_cpu_s
    tokens = last.sampled - first.sampled
    inside = [r for r in watch.readings if first.at <= r.at <= last.at]
    mean_active = float(np.mean([r.active for r in inside]))
    return {
        "goodput": tokens / wall,
        "per_cpu_s": tokens / max(1e-9, cpu),
        "cores": cpu / wall,
        "starved": (last.server_waited_s - first.server_waited_s) / wall,
        "hits": (last.cached - first.cached) / max(1, last.prompts - first.prompts),
        "active": mean_active,
        "cap": float(np.mean([r.cap for r in inside])),
        "preemptions": float(last.preemptions - first.preemptions),
        "parked": float(watch.parked),
        "wasted": watch.wasted / max(1, watch.sampled),
        "ramp_s": next((r.at for r in watch.readings if r.active >= 0.9 * mean_active), float("nan")),
    }
