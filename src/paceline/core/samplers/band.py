"""A band of success rates: what is neither solved nor hopeless teaches most (as in the online filtering of DAPO,
arXiv:2503.14476, which draws and throws away; here it is not drawn)."""

from __future__ import annotations

from typing import Any

from paceline.core.samplers.base import ByWeight
from paceline.errors import ConfigError


class SuccessBand(ByWeight):
    """Tasks whose mean reward is from `low` to `high` weigh 1, the others `outside`."""

    def __init__(
        self, size: int, seed: int, *, low: float = 0.1, high: float = 0.9, outside: float = 0.1, **more: Any
    ) -> None:
        if not low < high or not 0 < outside <= 1:
            raise ConfigError(
                f"a band from {low} to {high} with {outside} outside: low < high, and outside above 0 and at most 1"
            )
        super().__init__(size, seed, **more)
        self._low, self._high, self._outside = low, high, outside

    def weight(self, mean: float) -> float:
        return 1.0 if self._low <= mean <= self._high else self._outside
