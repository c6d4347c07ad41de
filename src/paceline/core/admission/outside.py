"""A cap for an engine that gives no metrics: what is seen from outside, latency and refusals, is the signal."""

from __future__ import annotations

TOLERANCE = 3.0
"""Seconds a token may rise to this many times their best. Batching slows a token by up to about twice (memory-bound
decode) before memory or prefill do; beyond that, a larger cap buys little."""

GROWTH, CUT, REFUSED_CUT = 1.15, 0.85, 0.7
FORGET = 1.01
"""The best latency seen rises by this factor a window, so that one lucky window does not rule for ever."""


class OutsideView:
    """Rises by a step while latency stays within bounds, falls when it does not or when the engine refuses (AIMD).

    A window is as many calls as the cap, so that every step is judged by calls that felt it.
    """

    __slots__ = ("_best", "_calls", "_refused", "_seconds", "_tokens", "cap", "reason")

    def __init__(self, start: float) -> None:
        self.cap = start
        self.reason = "the engine gives no metrics: going by latency and refusals"
        self._best = float("inf")
        self._calls = 0
        self._refused = 0
        self._seconds = 0.0
        self._tokens = 0

    def segment_ended(self, sampled: int, seconds: float, active: int, *, is_busy: bool) -> None:
        """One engine request came back: with what it sampled, or refused (`is_busy`), or failed, which says nothing."""
        if is_busy:
            self._refused += 1
        elif sampled:
            self._calls += 1
            self._seconds += seconds
            self._tokens += sampled
        if self._calls + self._refused >= max(4.0, self.cap):
            self._judge(active)

    def _judge(self, active: int) -> None:
        said = "the engine gives no metrics: "
        if self._refused:
            self.cap *= REFUSED_CUT
            self.reason = f"{said}it refused {self._refused} of {self._calls + self._refused} calls (429)"
        elif self._tokens:
            per_token = self._seconds / self._tokens
            self._best = min(self._best * FORGET, per_token)
            ratio = per_token / self._best if self._best else 1.0
            if ratio > TOLERANCE:
                self.cap *= CUT
                self.reason = f"{said}a token takes {ratio:.1f} times its best {self._best * 1e3:.1f} ms"
            elif active >= 0.9 * self.cap:
                # Doubling by multiples of 1.15 takes five windows; never less than one rollout, or 1 would stay 1.
                self.cap = max(self.cap + 1.0, self.cap * GROWTH)
                self.reason = f"{said}a token takes {ratio:.1f} times its best, within {TOLERANCE:g}"
        self._calls = self._refused = self._tokens = 0
        self._seconds = 0.0
