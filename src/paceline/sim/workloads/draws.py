"""Numbers drawn for a purpose: from 64 bits and a counter, never from a generator that others use too."""

from __future__ import annotations

from math import exp
from statistics import NormalDist
from typing import Final

from paceline.core.streams import uniform

_quantile = NormalDist().inv_cdf
_LEAST = 2.0**-54
_MOST = 700.0
"""Of an exponent: beyond it a float is full."""
MOST_SIGMA: Final = 10.0
"""Of a logarithm. No lengths spread so far: one in a million is e^47 times the median."""


def normal(base: int, counter: int) -> float:
    """A standard normal number for the `counter`-th use of `base`."""
    return _quantile(max(_LEAST, uniform(base, counter)))


def lognormal(median: float, sigma: float, z: float) -> float:
    """The log-normal number that the standard normal `z` stands for."""
    return median * grown(sigma * z)


def grown(by: float) -> float:
    """e to this, or the most that a float can be."""
    return exp(min(_MOST, by))


def whole(value: float, most: int) -> int:
    """A count: at least 1, at most `most`."""
    return max(1, round(min(most, value)))
