"""Start rates: how many rollouts of an environment may be started in a minute."""

from __future__ import annotations


class StartRate:
    """A token bucket on whatever clock the caller uses; it holds one second's worth, at least one start."""

    __slots__ = ("_at", "_level", "_size", "per_s")

    def __init__(self, per_minute: float) -> None:
        self.per_s = per_minute / 60.0
        self._size = max(1.0, self.per_s)
        self._level = self._size
        self._at = 0.0

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._size, self._level + (now - self._at) * self.per_s)
            self._at = now

    def free(self, now: float) -> bool:
        """Whether one more may start now."""
        self._refill(now)
        # A hair below 1: the wake-up at `next_at` must not miss the start by one rounding error.
        return self._level >= 1.0 - 1e-9

    def take(self, now: float) -> None:
        """Start one."""
        self._refill(now)
        self._level -= 1.0

    def next_at(self, now: float) -> float:
        """When one more may start."""
        self._refill(now)
        return now + max(0.0, 1.0 - self._level) / self.per_s
