"""Random draws that depend on nothing but their key.

A task is a function of (environment, seed, split, index): drawing task 7 must not depend on whether task 6
was ever drawn, in this process or another. So there is no generator to share or to seed; there is a hash.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "eval"]
"""Training tasks, and the held-out ones."""

_EVAL_SHARE = 8
"""One problem in this many is held out of training."""


class Draws:
    """The numbers that belong to one key, in order. The same key gives the same numbers on any machine."""

    __slots__ = ("_count", "_key")

    def __init__(self, *key: str | int) -> None:
        self._key = "\0".join(map(str, key)).encode()
        self._count = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 up to, not including, `limit`."""
        block = hashlib.blake2b(self._key, digest_size=8, salt=self._count.to_bytes(8, "little"))
        self._count += 1
        # 64 bits against limits below a million: the bias of the remainder is under 1e-13.
        return int.from_bytes(block.digest(), "little") % limit

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)


def split_of(problem: str) -> Split:
    """The split that owns `problem`. It depends on the problem alone, so no seed can leak one."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8, person=b"split").digest()
    return "eval" if int.from_bytes(digest, "little") % _EVAL_SHARE == 0 else "train"
