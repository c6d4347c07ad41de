"""Begins rollouts a few at a time: hundreds that one decision starts would all take their first steps in one turn of the
loop, and sockets, timers and every other rollout would wait for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Final

from paceline.domain.ids import RolloutId
from paceline.runtime.model import Launch

AT_ONCE: Final = 32
"""Rollouts that one decision begins in its own turn of the loop, and each further turn. A count, not a time: runs must
repeat."""


class Starts:
    """Rollouts that were started, and those of them that have not begun."""

    __slots__ = ("_after", "_begin", "_begun", "_is_over", "_line", "_loop")

    def __init__(self, begin: Callable[[Launch], None], is_over: Callable[[], bool]) -> None:
        """`begin` makes the task of one; `is_over` says whether the run has ended, and none is to begin. Call on a running
        loop."""
        self._begin = begin
        self._is_over = is_over
        self._loop = asyncio.get_running_loop()
        self._line: dict[RolloutId, Launch] = {}
        self._after: dict[RolloutId, Callable[[], None]] = {}
        self._begun = 0

    def decide(self) -> None:
        """A decision is about to be carried out, which has begun none yet."""
        self._begun = 0

    def add(self, command: Launch) -> None:
        """Begin it now, or in one of the next turns of the loop, in order."""
        if self._is_over():
            return
        if self._begun < AT_ONCE and not self._line:
            self._begun += 1
            self._begin(command)
            return
        if not self._line:
            self._loop.call_soon(self._go_on)
        self._line[command.rollout] = command

    def once_begun(self, rollout: RolloutId, tell: Callable[[], None]) -> None:
        """Tell it something: now, or if it has not begun, when it has."""
        if rollout in self._line:
            self._after[rollout] = tell
        else:
            tell()

    def _go_on(self) -> None:
        line = self._line
        if self._is_over():
            line.clear()
            return
        for rollout in list(islice(line, AT_ONCE)):
            self._begin(line.pop(rollout))
            if (tell := self._after.pop(rollout, None)) is not None:
                tell()
        if line:
            self._loop.call_soon(self._go_on)
