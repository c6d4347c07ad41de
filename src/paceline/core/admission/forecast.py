"""What the rollouts in flight will hold soon: each grows as it has grown, and ends as others of its age did."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

STEPS: Final = 12
"""Moments looked at, up to the horizon."""

LEARN: Final = 0.02
BOUNDS: Final = (0.6, 1.5)
"""Of the correction by what came true, and its gain a reading."""


class Survival:
    """Kaplan and Meier's estimate of how long rollouts last; those in flight have lasted at least as long as they have."""

    __slots__ = ("_at", "_left")

    def __init__(self, durations: Sequence[float], ages: Array) -> None:
        ended = np.sort(np.array(durations, dtype=np.float64))
        times = np.unique(ended)
        if not len(times):
            self._at, self._left = np.array([0.0]), np.array([1.0])
            return
        every = np.sort(np.concatenate([ended, ages]))
        at_risk = len(every) - np.searchsorted(every, times, side="left")
        deaths = np.searchsorted(ended, times, side="right") - np.searchsorted(ended, times, side="left")
        left = np.cumprod(1.0 - deaths / at_risk)
        # One more than has been seen: nobody is known to be immortal, nor sure to end at the longest seen.
        self._at, self._left = np.concatenate([[0.0], times]), np.concatenate([[1.0], left])

    def beyond(self, ages: Array) -> Array:
        """P(a rollout lasts longer than each of `ages`)."""
        return self._left[np.searchsorted(self._at, ages, side="right") - 1]


class Forecast:
    """Looks ahead for one engine, and learns from how it did: what it said of the context of a rollout at the end of
    its horizon is compared with what there is then."""

    __slots__ = ("_due", "bias")

    def __init__(self) -> None:
        self.bias = 1.0
        """What there was over what was said, per rollout."""
        self._due: deque[tuple[float, float]] = deque()

    def room_for(
        self,
        ages: Array,
        contexts: Array,
        survival: Survival,
        *,
        growth: float,
        first: float,
        horizon_s: float,
        bound: float,
        now: float,
    ) -> float:
        """Rollouts that may start now without the working set passing `bound` within the horizon; negative if it will
        anyway, although each that ends is followed by a new one.

        `growth`: tokens a second; `first`: context of a new rollout.
        """
        ahead = np.linspace(0.0, max(horizon_s, 1e-3), STEPS)
        young = first + growth * ahead * survival.beyond(ahead)
        if not len(ages):
            return float((bound / young).min())
        self._learn(float(contexts.mean()), now)
        alive = survival.beyond(ages)
        lasts = survival.beyond(ages[:, None] + ahead) / np.maximum(alive, 1e-9)[:, None]
        # Older than any seen: as likely to go on as not.
        lasts[alive <= 0.0] = 0.5
        held = (lasts * (contexts[:, None] + growth * ahead)).sum(axis=0)
        held += ((1.0 - lasts) * (first + growth * ahead / 2)).sum(axis=0)
        self._due.append((now + float(ahead[-1]), float(held[-1]) / len(ages)))
        held *= 1.0 + (self.bias - 1.0) * ahead / ahead[-1]
        return float(((bound - held) / young).min())

    def _learn(self, mean: float, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, said = self._due.popleft()
            self.bias += LEARN * (mean / said - self.bias)
            self.bias = min(BOUNDS[1], max(BOUNDS[0], self.bias))
