"""The prefix cache: which prefixes are kept, in whole blocks, and what goes when room is needed.

A context is a chain of segments: what all rollouts of an environment begin with, what a group begins with, and the
conversation of one rollout. Each segment is one entry, so that a lookup costs as many steps as the chain has, and not as
many as there are blocks. An entry that a running request uses is pinned. The others are in one line, least recently used
first, and lose blocks from their tail, as vLLM frees a request's last block first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class Entry:
    """One segment of a context."""

    __slots__ = ("blocks", "users")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        """Whole blocks that are kept."""
        self.users = 0
        """Running requests that hold it."""


class PrefixCache:
    """Blocks are counted, not numbered: identity does not matter for what fits."""

    __slots__ = ("_line", "_pinned", "idle_blocks", "shared_blocks")

    def __init__(self) -> None:
        self._line: OrderedDict[Hashable, int] = OrderedDict()
        """Entries that nobody uses, least recently used first, and their blocks."""
        self._pinned: dict[Hashable, Entry] = {}
        """Shared segments in use."""
        self.idle_blocks = 0
        """Blocks that nobody uses."""
        self.shared_blocks = 0
        """Blocks of shared segments in use, each counted once."""

    def missing(self, chain: Sequence[tuple[Hashable, int]]) -> int:
        """Blocks of the shared segments of `chain` that are not in use yet: what pinning them would add."""
        return sum([blocks for key, blocks in chain if key not in self._pinned])

    def hits(self, chain: Sequence[tuple[Hashable, int]], own: Hashable) -> int:
        """Blocks from the start of the context that are there: of the shared segments, then of its own."""
        found = 0
        for key, blocks in chain:
            if key in self._pinned:
                found += blocks
                continue
            there = self._line.get(key, 0)
            found += min(there, blocks)
            if there < blocks:
                return found
        return found + self._line.get(own, 0)

    def pin(self, chain: Sequence[tuple[Hashable, int]], own: Hashable) -> None:
        """A request begins to run: its segments are not given up while it does. Its own blocks are its business."""
        line = self._line
        for key, blocks in chain:
            entry = self._pinned.get(key)
            if entry is None:
                self.idle_blocks -= line.pop(key, 0)
                entry = self._pinned[key] = Entry(blocks)
                self.shared_blocks += blocks
            entry.users += 1
        self.idle_blocks -= line.pop(own, 0)

    def release(self, chain: Sequence[tuple[Hashable, int]], own: Hashable, blocks: int) -> None:
        """It runs no more; `blocks` whole ones of its own are kept until others need the room."""
        line = self._line
        if blocks:
            line[own] = blocks
            self.idle_blocks += blocks
        for key, _ in reversed(chain):
            entry = self._pinned[key]
            entry.users -= 1
            if not entry.users:
                del self._pinned[key]
                self.shared_blocks -= entry.blocks
                line[key] = entry.blocks
                self.idle_blocks += entry.blocks

    def give_up(self, blocks: int) -> None:
        """Make room for `blocks`, or for as many as there are."""
        line = self._line
        while blocks > 0 and line:
            key, held = next(iter(line.items()))
            if held > blocks:
                line[key] = held - blocks
                self.idle_blocks -= blocks
                return
            del line[key]
            self.idle_blocks -= held
            blocks -= held

    def clear(self) -> None:
        """Nothing that is idle is of use any more."""
        self._line.clear()
        self.idle_blocks = 0
