"""Counter-based randomness: a number depends on what it is drawn for, never on what was drawn before.

`draw(seed, "env", 17)` is the same in any order, in any process, on any machine, so a change in one part of a
run does not reshuffle the rest, and nothing has to be saved to resume.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def key(seed: int, *what: int | str) -> int:
    """64 uniform bits for one purpose, from BLAKE2b over the purpose's name."""
    text = "\x1f".join((str(seed), *map(str, what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(base: int, counter: int) -> int:
    """64 uniform bits for the `counter`-th use of `base`: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

    The cheap way to many numbers from one `key`.
    """
    z = (base + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(base: int, counter: int) -> float:
    """A float in [0, 1) for the `counter`-th use of `base`."""
    return (mix(base, counter) >> 11) * 2.0**-53


def permutation(seed: int, n: int, *what: int | str) -> NDArray[np.int64]:
    """A shuffle of `range(n)` for one purpose, by Philox keyed with the purpose."""
    return np.random.Generator(np.random.Philox(key=key(seed, *what))).permutation(n)
