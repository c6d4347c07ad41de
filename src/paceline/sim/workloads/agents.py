"""Agents: turns of growing context with waits on tools between them."""

from __future__ import annotations

from random import Random

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.streams import key, mix
from paceline.domain.commands import StartRollout
from paceline.domain.rollout import COMPLETED, Outcome
from paceline.sim.plan import RolloutPlan
from paceline.sim.workloads.draws import MOST_SIGMA, lognormal, normal, whole

_FULL = Outcome("truncated", "context", "the longest context")


class Tool(Section):
    """One kind of tool call."""

    share: float = Field(gt=0)
    """Share of the calls, relative to the other kinds'."""
    median_s: float = Field(ge=0)
    """Median seconds."""
    sigma: float = Field(default=0.0, ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm."""
    tail_s: float = Field(default=0.0, ge=0)
    """Mean of an exponential number of seconds on top."""


class AgentTurns(Section):
    """What agents do."""

    turns: float = Field(gt=0)
    """Median turns of a rollout."""
    turns_sigma: float = Field(default=0.63, ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm."""
    turns_task_share: float = Field(default=0.0, ge=0, le=1)
    """Share of its variance that is the task's."""
    max_turns: int = Field(default=100, ge=1)
    """Most turns."""
    turns_at_end: float | None = Field(default=None, gt=0)
    """Median turns after `drift_s`; it goes there evenly, in the logarithm. None: it stays."""
    drift_s: float = Field(default=14_400.0, gt=0)
    """Seconds over which the median of the turns drifts."""
    scaffold: int = Field(default=0, ge=0)
    """Tokens that all rollouts begin with."""
    prompt: int = Field(default=2500, ge=1)
    """Tokens of the task behind it."""
    sampled: float = Field(default=145.0, gt=0)
    """Median tokens sampled in a turn."""
    sampled_sigma: float = Field(default=1.0, ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm."""
    max_sampled: int = Field(default=4096, ge=1)
    """Most tokens of a turn."""
    observed: float = Field(default=303.0, gt=0)
    """Median tokens that a tool returns."""
    observed_sigma: float = Field(default=1.3, ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm."""
    max_observed: int = Field(default=8192, ge=1)
    """Most tokens that a tool returns."""
    cap: int = Field(default=32_000, ge=2)
    """Longest context; the rollout ends before it would be longer."""
    tools: tuple[Tool, ...] = Field(default=(Tool(share=1, median_s=1.0),), min_length=1)
    """Kinds of tool calls."""
    start_s: float = Field(default=0.0, ge=0)
    """Median seconds until a sandbox is up."""
    start_sigma: float = Field(default=0.0, ge=0, le=MOST_SIGMA)
    """Standard deviation of its logarithm."""
    score_s: float = Field(default=0.0, ge=0)
    """Seconds to score a rollout."""

    @model_validator(mode="after")
    def _prompt_fits(self) -> AgentTurns:
        if self.scaffold + self.prompt >= self.cap:
            raise ValueError(
                f"scaffold {self.scaffold} + prompt {self.prompt} leave no room in a context of {self.cap}: raise cap"
            )
        return self


class Agents:
    """A workload of agents."""

    def __init__(self, turns: AgentTurns, seed: int) -> None:
        self.shape = turns
        self._key = key(seed, "workload", "agents")
        total = sum(tool.share for tool in turns.tools)
        self._tools = [(tool.share / total, tool) for tool in turns.tools]

    @property
    def longest(self) -> int:
        return self.shape.cap

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        shape = self.shape
        random = Random(command.noise_seed)
        task = mix(self._key, command.task.index)
        count = whole(lognormal(self._median(now), shape.turns_sigma, self._z(task, random)), shape.max_turns)
        context = shape.scaffold + shape.prompt
        made: list[tuple[float, int, int]] = []
        outcome = COMPLETED
        for number in range(count):
            wait, observed = 0.0, 0
            if number:
                wait = self._wait(random)
                observed = whole(
                    lognormal(shape.observed, shape.observed_sigma, random.gauss(0, 1)), shape.max_observed
                )
            sampled = whole(
                lognormal(shape.sampled, shape.sampled_sigma, random.gauss(0, 1)), shape.max_sampled
            )
            if context + observed + sampled > shape.cap and made:
                outcome = _FULL
                break
            sampled = min(sampled, shape.cap - context)
            context += observed + sampled
            made.append((wait, observed, sampled))
        start_s = lognormal(shape.start_s, shape.start_sigma, random.gauss(0, 1)) if shape.start_s else 0.0
        return RolloutPlan(
            prompt=shape.prompt,
            turns=tuple(made),
            scaffold=shape.scaffold,
            start_s=start_s,
            score_s=shape.score_s,
            reward=float(random.random() < 0.5),
            outcome=outcome,
        )

    def _median(self, now: float) -> float:
        shape = self.shape
        if shape.turns_at_end is None:
            return shape.turns
        return float(shape.turns * (shape.turns_at_end / shape.turns) ** min(1.0, now / shape.drift_s))

    def _z(self, task: int, random: Random) -> float:
        share = self.shape.turns_task_share
        own = random.gauss(0, 1)
        return float(share**0.5 * normal(task, 0) + (1 - share) ** 0.5 * own) if share else own

    def _wait(self, random: Random) -> float:
        at = random.random()
        tool = self._tools[-1][1]
        for share, each in self._tools:
            at -= share
            if at < 0:
                tool = each
                break
        wait = lognormal(tool.median_s, tool.sigma, random.gauss(0, 1)) if tool.sigma else tool.median_s
        return wait + (random.expovariate(1 / tool.tail_s) if tool.tail_s else 0.0)
