"""Scoring in a simulation: how long it takes, and how many rollouts are scored at once.

last turn ─▶ [ line, first come first scored ] ─▶ scored ─▶ the rollout ends

Rewards that run code or ask a judge have places of their own. While answers are long scoring goes on beside them; where a
policy makes answers end together, they wait for each other here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.core.streams import key, mix
from paceline.domain.commands import StartRollout
from paceline.sim.plan import RolloutPlan, Workload
from paceline.sim.rollouts import SimRollout
from paceline.sim.workloads.draws import MOST_SIGMA, lognormal, normal


class ScoringModel(Section):
    """How rollouts of an environment are scored."""

    at_once: int | None = Field(default=None, ge=1)
    """Rollouts that are scored at once; the others wait, first come first scored. None: all of them."""
    median_s: float | None = Field(default=None, gt=0)
    """Median seconds to score one; none: as the workload has it."""
    sigma: float = Field(default=0.0, ge=0, le=MOST_SIGMA)
    """Standard deviation of the logarithm."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which scoring one is given up, and its reward is what it is; none: it never is."""

    @model_validator(mode="after")
    def _spread_is_of_something(self) -> ScoringModel:
        if self.sigma and self.median_s is None:
            raise ValueError(
                f"sigma is {self.sigma:g}, and there is no median_s that it could be about: give median_s"
            )
        return self


class Scored:
    """A workload whose scoring takes what the section says. Drawn from a rollout's noise, so that every policy meets the same."""

    def __init__(self, workload: Workload, scoring: ScoringModel, seed: int) -> None:
        self._workload = workload
        self._scoring = scoring
        self._key = key(seed, "workload", "scoring")

    @property
    def longest(self) -> int:
        return self._workload.longest

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        plan, scoring = self._workload.plan(command, now), self._scoring
        seconds = plan.score_s
        if scoring.median_s is not None:
            z = normal(mix(self._key, command.noise_seed), 0) if scoring.sigma else 0.0
            seconds = lognormal(scoring.median_s, scoring.sigma, z)
        if scoring.timeout_s is not None:
            seconds = min(seconds, scoring.timeout_s)
        return msgspec.structs.replace(plan, score_s=seconds)


class ScoringLine:
    """The places of one environment."""

    def __init__(self, at_once: int, begin: Callable[[SimRollout], None]) -> None:
        """`begin` is called when a rollout has a place."""
        self._free = at_once
        self._begin = begin
        self._waiting: deque[SimRollout] = deque()

    def come(self, rollout: SimRollout) -> None:
        """It has taken its last turn."""
        if self._free:
            self._seat(rollout)
        else:
            self._waiting.append(rollout)

    def leave(self, rollout: SimRollout) -> None:
        """It is over. Does nothing for one that had no place."""
        if not rollout.has_scorer:
            return
        rollout.has_scorer = False
        self._free += 1
        while self._waiting:
            following = self._waiting.popleft()
            if not following.is_over:
                self._seat(following)
                return

    def _seat(self, rollout: SimRollout) -> None:
        self._free -= 1
        rollout.has_scorer = True
        self._begin(rollout)
