"""Who waits, best first, when places in line change: heaps whose outdated entries are left where they are until they
come up.

`put`, `drop` and the first few in line cost O(log n), however many wait.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, TypeAlias

from paceline.domain.ids import EnvName, GroupId, RolloutId

Rank: TypeAlias = tuple[float, float]
"""Smaller comes first."""

Name: TypeAlias = GroupId | RolloutId
"""Who waits: the next member of a group, or a rollout that gave way."""

Key: TypeAlias = tuple[Rank, tuple[int, int, int]]
"""Rank, and what decides between equals: group, member, attempt."""

_SLACK: Final = 64
"""Outdated entries that are never worth a clearing out."""


class Line:
    """One order of those that wait."""

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[Key, Name]] = {}
        self._heap: list[tuple[Key, Name]] = []
        """Entries; one that is not the entry of its name any more is outdated."""

    def put(self, name: Name, key: Key) -> None:
        """Let it wait at this place, or change its place."""
        known = self._entries.get(name)
        if known is not None and known[0] == key:
            return
        entry = self._entries[name] = (key, name)
        heap = self._heap
        if len(heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [*self._entries.values()]
            heapify(self._heap)
        else:
            heappush(heap, entry)

    def drop(self, name: Name) -> None:
        """It does not wait any more, if it did."""
        self._entries.pop(name, None)

    def firsts(self, count: int, waits: Callable[[Name], bool]) -> list[tuple[Key, Name]]:
        """The first `count` in line, in order; who does not wait any more by `waits` is dropped."""
        heap, entries = self._heap, self._entries
        found: list[tuple[Key, Name]] = []
        while heap and len(found) < count:
            entry = heappop(heap)
            name = entry[1]
            if entries.get(name) is not entry:
                continue
            if waits(name):
                found.append(entry)
            else:
                del entries[name]
        for entry in found:
            heappush(heap, entry)
        return found


class Lines:
    """One order over several lines, any of which may stand still: rollouts that gave way, and for each environment the
    groups with members to start, since its start rate may hold them back."""

    __slots__ = ("_by_env", "_standing")

    def __init__(self) -> None:
        self._standing = Line()
        self._by_env: dict[EnvName, Line] = {}

    def of(self, env: EnvName | None) -> Line:
        """The line of an environment's groups; None: of the rollouts that gave way."""
        if env is None:
            return self._standing
        line = self._by_env.get(env)
        if line is None:
            line = self._by_env[env] = Line()
        return line

    def firsts(
        self, count: int, waits: Callable[[Name], bool], may_start: Callable[[EnvName], bool]
    ) -> list[tuple[Key, Name]]:
        """The first `count` over all lines that do not stand still, in order."""
        found = self._standing.firsts(count, waits)
        for env, line in self._by_env.items():
            some = line.firsts(count, waits)
            if some and may_start(env):
                found += some
        if len(found) > 1:
            found.sort()
            del found[count:]
        return found
