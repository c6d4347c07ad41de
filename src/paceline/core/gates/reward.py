"""Groups that are neither solved nor hopeless, as DAPO's dynamic sampling keeps them (arXiv:2503.14476)."""

from __future__ import annotations

from paceline.core.gates.base import PASSES, Judgement, Outcome, Stateless
from paceline.errors import ConfigError


class RewardBand(Stateless):
    """Refuses a group whose mean reward is not from `low` to `high`. One that nobody scored passes."""

    def __init__(self, size: int | None, seed: int, *, low: float = 0.0, high: float = 1.0) -> None:
        if not low < high:
            raise ConfigError(f"a gate for mean rewards from {low} to {high}: low is below high")
        self._low, self._high = low, high

    def judge(self, outcome: Outcome) -> Judgement:
        mean = outcome.reward_mean
        if mean is None or self._low <= mean <= self._high:
            return PASSES
        return Judgement(f"mean reward {mean:.3g}, not from {self._low:g} to {self._high:g}")
