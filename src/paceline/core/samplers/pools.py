"""Difficulty pools: tasks by their mean reward, each pool with a weight of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.samplers.base import ByWeight
from paceline.errors import ConfigError


class DifficultyPools(ByWeight):
    """A task whose mean reward is at most `bounds[i]` weighs `weights[i]`; above the last bound, the last weight.

    The defaults are prime-rl's: hard up to 0.25 and easy above 0.75 are drawn a fifth as often as what is between.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        bounds: Sequence[float] = (0.25, 0.75),
        weights: Sequence[float] = (0.2, 1.0, 0.2),
        **more: Any,
    ) -> None:
        if len(weights) != len(bounds) + 1 or list(bounds) != sorted(bounds) or min(weights) <= 0:
            raise ConfigError(
                f"difficulty pools with bounds {list(bounds)} and weights {list(weights)}: bounds rise, and there is "
                "one weight more than there are bounds, each above 0"
            )
        super().__init__(size, seed, **more)
        self._bounds, self._weights = tuple(bounds), tuple(weights)

    def weight(self, mean: float) -> float:
        for bound, weight in zip(self._bounds, self._weights, strict=False):
            if mean <= bound:
                return weight
        return self._weights[-1]
