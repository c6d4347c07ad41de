"""Groups that move the policy too little (prime-rl's advantage gate, whose bounds are 0 and 0)."""

from __future__ import annotations

from paceline.core.gates.base import PASSES, Judgement, Outcome, Stateless
from paceline.errors import ConfigError


class AdvantageRange(Stateless):
    """Refuses a group all of whose advantages are from `low` to `high`. One without advantages passes."""

    def __init__(self, size: int | None, seed: int, *, low: float = 0.0, high: float = 0.0) -> None:
        if low > high:
            raise ConfigError(f"a gate for advantages from {low} to {high}: low is at most high")
        self._low, self._high = low, high

    def judge(self, outcome: Outcome) -> Judgement:
        found = outcome.advantages
        if not found or not self._low <= min(found) <= max(found) <= self._high:
            return PASSES
        return Judgement(
            f"advantages from {min(found):.3g} to {max(found):.3g}, all within {self._low:g} and {self._high:g}"
        )
