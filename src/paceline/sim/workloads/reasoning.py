"""Single answers whose lengths are correlated within a group and have a heavy tail.

    ln L = mu + task + checkpoint + task x checkpoint + sample       four normal terms, after TailSieve's variance shares
    with runaways: a task is prone with probability f; a sample of a prone task hits the cap with probability q ~ Beta(a, b)

Lengths in the field: RollPacker (arXiv:2509.21009), Seer (arXiv:2511.14617), TailSieve. `docs/benchmarks/scheduling.md`
says what each preset was fitted to.
"""

from __future__ import annotations

from math import exp, log, sqrt
from random import Random

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.streams import key, mix, uniform
from paceline.domain.commands import StartRollout
from paceline.domain.rollout import COMPLETED, Outcome
from paceline.sim.plan import RolloutPlan
from paceline.sim.workloads.draws import MOST_SIGMA, grown, lognormal, normal, whole

_CUT = Outcome("truncated", "tokens", "the longest answer")
_KEPT_TASKS = 4096


class ReasoningLengths(Section):
    """Lengths of single answers."""

    median: float = Field(gt=0)
    """Median length in tokens, runaways aside."""
    sigma: float = Field(ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm, over everything."""
    cap: int = Field(ge=1)
    """Longest answer in tokens; longer ones are truncated there."""
    icc: float | None = Field(default=None, ge=0, le=1)
    """Correlation of the lengths (not of their logarithms) of two members of a group; or give `task_share`."""
    task_share: float = Field(default=0.65, ge=0, le=1)
    """Share of the logarithm's variance that is the task's."""
    checkpoint_share: float = Field(default=0.0, ge=0, le=1)
    """Share that is the policy version's, for all tasks alike."""
    task_checkpoint_share: float = Field(default=0.0, ge=0, le=1)
    """Share that is the task's under one policy version."""
    drift: float = Field(default=0.0, ge=-1, le=1)
    """By how much the logarithm of the median grows at each step: 0.005 is half a percent."""
    runaway_tasks: float = Field(default=0.0, ge=0, le=1)
    """Share of the tasks that are prone to run away."""
    runaway_a: float = Field(default=1.0, gt=0)
    """First parameter of the Beta distribution of how often a sample of a prone task runs away."""
    runaway_b: float = Field(default=9.0, gt=0)
    """Second parameter."""
    prompt: float = Field(default=300.0, ge=1)
    """Median prompt in tokens."""
    prompt_sigma: float = Field(default=0.4, ge=0, le=MOST_SIGMA)
    """Standard deviation of its logarithm."""
    score_s: float = Field(default=0.0, ge=0)
    """Median seconds to score an answer."""
    score_sigma: float = Field(default=0.0, ge=0, le=MOST_SIGMA)
    """Standard deviation of its logarithm."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> ReasoningLengths:
        if (
            total := self.task_variance_share + self.checkpoint_share + self.task_checkpoint_share
        ) > 1 + 1e-9:
            raise ValueError(f"the shares of the variance add up to {total:.2f}, and may not be more than 1")
        return self

    @property
    def task_variance_share(self) -> float:
        """Share of the variance of the logarithm that is the task's. From `icc` by the moments of a log-normal:
        icc = (exp(s²) - 1) / (exp(sigma²) - 1), s² being the variance that members share."""
        if self.icc is None or not self.sigma:
            return self.task_share
        variance = self.sigma**2
        return max(0.0, log(1 + self.icc * (exp(variance) - 1)) / variance - self.task_checkpoint_share)


class Reasoning:
    """A workload of single answers."""

    def __init__(self, lengths: ReasoningLengths, seed: int) -> None:
        self.lengths = lengths
        self._key = key(seed, "workload", "reasoning")
        self._tasks: dict[int, tuple[int, int, float, float, float]] = {}
        task, checkpoint, both = (
            lengths.task_variance_share,
            lengths.checkpoint_share,
            lengths.task_checkpoint_share,
        )
        self._parts = tuple(
            lengths.sigma * sqrt(max(0.0, share))
            for share in (task, checkpoint, both, 1.0 - task - checkpoint - both)
        )

    @property
    def longest(self) -> int:
        return self.lengths.cap + 16 * round(self.lengths.prompt)

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        lengths = self.lengths
        base, prompt, effect, runaway, solved = self._task(command.task.index)
        noise = command.noise_seed
        version = command.version
        _, by_checkpoint, by_both, by_sample = self._parts
        shift = effect + by_sample * normal(noise, 0)
        if by_checkpoint:
            shift += by_checkpoint * normal(self._key, version)
        if by_both:
            shift += by_both * normal(base, 16 + version)
        if lengths.drift:
            shift += lengths.drift * version
        tokens = whole(lengths.median * grown(shift), lengths.cap + 1)
        is_cut = tokens > lengths.cap or (runaway > 0 and uniform(noise, 1) < runaway)
        if is_cut:
            tokens = lengths.cap
        reward = 0.0 if is_cut else float(uniform(noise, 2) < solved)
        score_s = lengths.score_s
        if score_s and lengths.score_sigma:
            score_s = lognormal(score_s, lengths.score_sigma, normal(noise, 3))
        return RolloutPlan(
            prompt=prompt,
            turns=((0.0, 0, tokens),),
            reward=reward,
            score_s=score_s,
            outcome=_CUT if is_cut else COMPLETED,
        )

    def _task(self, index: int) -> tuple[int, int, float, float, float]:
        """Of a task: its bits, prompt, effect on the logarithm, how often it runs away, how often it is solved."""
        known = self._tasks.get(index)
        if known is not None:
            return known
        lengths = self.lengths
        base = mix(self._key, index)
        runaway = 0.0
        if lengths.runaway_tasks and uniform(base, 0) < lengths.runaway_tasks:
            runaway = Random(base).betavariate(lengths.runaway_a, lengths.runaway_b)
        prompt = whole(
            lognormal(lengths.prompt, lengths.prompt_sigma, normal(base, 1)), 16 * round(lengths.prompt)
        )
        made = base, prompt, self._parts[0] * normal(base, 2), runaway, uniform(base, 3)
        if len(self._tasks) >= _KEPT_TASKS:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[index] = made
        return made
