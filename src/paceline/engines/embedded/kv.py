"""Which block of the KV cache belongs to whom: reference counts, prefix cache, least recently used out.

Bookkeeping only, no tensors. A block is in exactly one of three places:

    empty       nobody uses it, nothing in it is worth keeping
    idle        nobody uses it, but it holds a hashed prefix: found again by a match, or evicted, oldest first
    referenced  at least one sequence uses it (and it may be hashed, so others can join)

Block 0 is never handed out: tables are padded with it and masks hide it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from paceline.errors import InvariantError


def prefix_root(epoch: int, salt: str | None) -> bytes:
    """Parent of a sequence's first block. Blocks of other weights or of another salt can never match."""
    return hashlib.blake2b(f"{epoch}:{salt or ''}".encode(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], root: bytes, ids: Sequence[int], block_size: int, upto: int) -> None:
    """Append to `hashes` those of the full blocks of ids[:upto]: each covers its parent, so the whole prefix."""
    for start in range(len(hashes) * block_size, upto - block_size + 1, block_size):
        block = array("q", ids[start : start + block_size]).tobytes()
        hashes.append(hashlib.blake2b((hashes[-1] if hashes else root) + block, digest_size=16).digest())


class BlockPool:
    """Owner of blocks 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._hash: list[bytes | None] = [None] * (num_blocks + 1)
        self._cached: dict[bytes, int] = {}
        self._empty = list(range(num_blocks, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that could be handed out now, evicting idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def referenced(self) -> int:
        return self.num_blocks - self.available

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix; they are not yet held."""
        found: list[int] = []
        for key in hashes:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, fresh: int, matched: Sequence[int] = ()) -> list[int] | None:
        """Hold `matched` and `fresh` more blocks; None, with nothing changed, if there are too few."""
        woken = sum(1 for block in matched if self._references[block] == 0)
        if fresh + woken > self.available:
            return None
        for block in matched:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        blocks = list(matched)
        for _ in range(fresh):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _none = self._idle.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a held, full block. The first of two equal blocks stays the one that is found."""
        if self._references[block] == 0:
            raise InvariantError(f"block {block} is published, but nobody holds it")
        if self._hash[block] is None and key not in self._cached:
            self._hash[block] = key
            self._cached[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. The last goes first, so a prefix outlives what was built on it."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise InvariantError(f"block {block} is released more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """Empty the prefix cache. Held blocks stay held, but no later sequence finds them."""
        for block in self._cached.values():
            self._hash[block] = None
        self._cached.clear()
        self._empty.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        key = self._hash[block]
        if key is not None:
            del self._cached[key]
            self._hash[block] = None
