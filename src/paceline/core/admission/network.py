"""What an engine yields with N rollouts: a closed network of one engine and the world outside, with an LRU cache.

`docs/architecture.md` ("Admission") has the equations. They are solved over a grid of B, the calls that run at once;
everything else follows from it. The hit rate is a fixed point: more turns a second leave a context less time in the
cache, so fewer hits, so more prefill, so fewer turns a second. The two sides move in opposite directions, so bisection
finds it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.admission.learning import Profile, Speed

Array: TypeAlias = NDArray[np.float64]

POINTS: Final = 96
"""Of the grid over B, and of the grid over cache times."""

GOOD_ENOUGH: Final = 0.995
"""The smallest N with this share of the best yield is taken: on a plateau, fewer rollouts are fresher."""


class Yield(msgspec.Struct, frozen=True):
    """Turns a second by number of rollouts, the worse of what can happen."""

    rollouts: Array
    turns_per_s: Array
    hit_rate: Array
    """Expected, at the mean context, on the good side."""
    best: int
    """Rollouts at which it yields most."""

    def at(self, rollouts: float) -> float:
        """Turns a second with so many rollouts."""
        return float(np.interp(rollouts, self.rollouts, self.turns_per_s))

    def hits_at(self, rollouts: float) -> float:
        return float(np.interp(rollouts, self.rollouts, self.hit_rate))


class _Curve(msgspec.Struct, frozen=True):
    rollouts: Array
    turns_per_s: Array
    hit_rate: Array


def solve(profile: Profile, speed: Speed, capacity: float, most: int, risk: float) -> Yield:
    """The yield of one engine with `capacity` tokens of KV cache, for 1 to `most` rollouts.

    `risk`: standard deviations by which the sum of contexts may lie above its mean.
    """
    running = profile.context + profile.sampled / 2
    # A call under way is anywhere between nothing sampled and all of it: variance E[s²]/3 - E[s]²/4.
    spread = np.sqrt(profile.sd**2 + max(0.0, profile.sampled_sq / 3 - profile.sampled**2 / 4))
    cache = _Cache(profile)
    calls = np.geomspace(min(0.2, capacity / running), capacity / running, POINTS)
    mean = _curve(profile, speed, cache, capacity, calls, np.ones(POINTS))
    heavier = 1.0 + risk * spread / (running * np.sqrt(np.maximum(mean.rollouts, 1.0)))
    fits = calls * running * heavier <= capacity
    fits[:2] = True
    bad = _curve(profile, speed, cache, capacity, calls[fits], heavier[fits])
    top = max(1.0, float(mean.rollouts.max()), float(bad.rollouts.max()))
    rollouts = _numbers(min(most, int(np.ceil(1.5 * top)) + 1))
    worse = np.minimum(_least(mean, rollouts), _least(bad, rollouts))
    best = int(rollouts[np.argmax(worse >= GOOD_ENOUGH * worse.max())])
    rise: Array = np.maximum.accumulate(mean.rollouts)
    return Yield(rollouts, worse, np.interp(rollouts, rise, mean.hit_rate), best)


def _numbers(top: int) -> Array:
    if top <= 512:
        return np.arange(1, top + 1, dtype=np.float64)
    numbers: Array = np.unique(np.round(np.geomspace(1.0, top, 512)))
    return numbers


def _least(curve: _Curve, rollouts: Array) -> Array:
    """The least of the turns a second that go with each number of rollouts; beyond them all, those of a full cache."""
    n, x = curve.rollouts, curve.turns_per_s
    low, high = np.minimum(n[:-1], n[1:]), np.maximum(n[:-1], n[1:])
    at = rollouts[:, None]
    share = np.clip((at - n[:-1]) / np.where(np.diff(n) == 0.0, 1.0, np.diff(n)), 0.0, 1.0)
    values = np.where((at >= low) & (at <= high), x[:-1] + share * np.diff(x), np.inf)
    least: Array = values.min(axis=1)
    least[rollouts < n.min()] = x[0] * rollouts[rollouts < n.min()] / n.min()
    # A full cache with others waiting is a state too, for any number that does not fit.
    full = rollouts >= n[-1]
    least[full] = np.minimum(least[full], x[-1])
    return least


def _curve(
    profile: Profile, speed: Speed, cache: _Cache, capacity: float, calls: Array, heavier: Array
) -> _Curve:
    context = profile.context * heavier
    running = context + profile.sampled / 2
    step = speed.fixed + speed.seq * calls + speed.token * calls * running
    decode = profile.sampled * step / calls
    again = 1.0 - 1.0 / profile.turns
    prefix = np.maximum(context - profile.observed, 0.0) * again
    new = profile.observed * again + profile.first / profile.turns
    room = np.maximum(capacity - calls * running, 0.0)
    low, high = np.zeros_like(calls), np.ones_like(calls)
    for _ in range(24):
        hits = (low + high) / 2
        turns = 1.0 / (decode + speed.prefill * (new + (1.0 - hits) * prefix))
        kept = cache.hit_rate(room / turns, heavier)
        low, high = np.where(kept > hits, hits, low), np.where(kept > hits, high, hits)
    hits = (low + high) / 2
    prefill = speed.prefill * (new + (1.0 - hits) * prefix)
    turns = 1.0 / (decode + prefill)
    return _Curve(calls + turns * (profile.outside_s + prefill), turns, hits)


class _Cache:
    """Che's approximation: a context stays in an LRU cache for a time t, the same for all."""

    def __init__(self, profile: Profile) -> None:
        waits = profile.waits
        longest = max(1.0, float(waits[-1]))
        times = np.concatenate([[0.0], np.geomspace(1e-3, 20.0 * longest, POINTS)])
        # Between two waits seen, any wait is as likely: no step in the middle of which a hit rate could jump.
        ranks = (np.arange(len(waits)) + 0.5) / len(waits)
        within = np.interp(times, waits, ranks, left=0.0, right=1.0)
        held = np.concatenate([[0.0], np.cumsum((1.0 - (within[1:] + within[:-1]) / 2) * np.diff(times))])
        again = 1.0 - 1.0 / profile.turns
        # A finished rollout's context is never wanted again, and stays just as long.
        self._tokens = again * profile.context * held + profile.final / profile.turns * times
        self._within = within

    def hit_rate(self, tokens_s: Array, heavier: Array) -> Array:
        """P(a context is still there), with room for `tokens_s` tokens for each turn a second."""
        rate: Array = np.interp(tokens_s / heavier, self._tokens, self._within)
        return rate
