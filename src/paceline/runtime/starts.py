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
"""Rollouts that begin in one turn of the loop. A count, not a time: runs must repeat."""


class Starts:
    """Rollouts that were started, and those of them that have not begun."""

    __slots__ = ("_begin", "_begun", "_line", "_loop")

    def __init__(self, begin: Callable[[Launch], None]) -> None:
        """`begin` makes the task of one. Call on a running loop."""
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._line: dict[RolloutId, Launch] = {}
        self._begun = 0

    def decide(self) -> None:
        """Decisions are about to be carried out, in a turn of the loop that has begun none yet."""
        self._begun = 0

    def add(self, command: Launch) -> None:
        """Begin it now, or in one of the next turns of the loop, in order."""
        if self._begun < AT_ONCE and not self._line:
            self._begun += 1
            self._begin(command)
            return
        if not self._line:
            self._loop.call_soon(self._go_on)
        self._line[command.rollout] = command

    def hurry(self, rollout: RolloutId) -> None:
        """Begin it now if it has not begun: it is to be told something."""
        command = self._line.pop(rollout, None)
        if command is not None:
            self._begin(command)

    def drop(self) -> None:
        """Begin none of them: the run has failed."""
        self._line.clear()

    def _go_on(self) -> None:
        line = self._line
        for rollout in list(islice(line, AT_ONCE)):
            self._begin(line.pop(rollout))
        if line:
            self._loop.call_soon(self._go_on)
