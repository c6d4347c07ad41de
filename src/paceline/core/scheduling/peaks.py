"""The most KV that rollouts of an engine will hold at once, by what is expected of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class Peaks:
    """Of seats with these contexts and expected rests: [n] tokens each.

    All sample one token a step, and each ends when what is expected of it has come. Whoever ends first is at its longest
    then, and all that outlast it have grown by as much: the most is held at the end of one of them. Built in O(n log n),
    so that one more can be weighed in O(log n).
    """

    __slots__ = ("_held", "_later", "_rests", "now")

    def __init__(self, contexts: Sequence[float], rests: Sequence[float]) -> None:
        rest = np.asarray(rests, np.float64)
        order = np.argsort(-rest, kind="stable")
        rest = rest[order]
        held = np.cumsum(np.asarray(contexts, np.float64)[order])
        ends = held + np.arange(1, len(rest) + 1) * rest
        """Held when each of them ends, the longest first."""
        self.now: float = float(ends.max()) if len(rest) else 0.0
        """The most, as they are."""
        self._rests: list[float] = (-rest).tolist()
        self._held: list[tuple[float, float]] = [
            (0.0, 0.0),
            *zip(held.tolist(), np.maximum.accumulate(ends).tolist(), strict=True),
        ]
        """Of the longest n: their contexts, and the most at the end of one of them."""
        later = np.maximum.accumulate((ends + rest)[::-1])[::-1]
        self._later: list[float] = [*later.tolist(), 0.0]
        """Of all but the longest n: the most at the end of one, if one more outlasts them that has nothing yet."""

    def with_one_more(self, context: float, rest: float) -> float:
        """The most with one more seat."""
        longer = bisect_right(self._rests, -rest)
        held, most = self._held[longer]
        own = held + context + (longer + 1) * rest
        later = self._later[longer]
        return max(most, own, later + context if later else 0.0)
