"""Notices that the event loop stands still: code of an environment that blocks holds up everything in the process.

Nothing in the loop can notice that, so a thread does: the loop beats, the thread counts its own ticks since the last
beat. It counts ticks and not seconds, because a process that was suspended as a whole has not been held up by anybody.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Final

from paceline.envs.plain import plain_frames
from paceline.errors import place_of

_TICK_S: Final = 1.0
_PATIENCE_S: Final = 10.0
"""Far beyond any work of our own on the loop (milliseconds), and of a busy machine."""


class StandstillWatch:
    """Watches the loop it is made in until `close`.

    `tell` is called once for each standstill, with where the code is; `end` when it has lasted `limit_s`. Both are
    called in the watching thread.
    """

    def __init__(
        self,
        tell: Callable[[float, str], None],
        end: Callable[[float, str], None],
        limit_s: float,
        *,
        patience_s: float = _PATIENCE_S,
        tick_s: float = _TICK_S,
    ) -> None:
        self._tell, self._end, self._limit_s = tell, end, limit_s
        self._patience_s, self._tick_s = patience_s, tick_s
        self._loop, self._of = asyncio.get_running_loop(), threading.get_ident()
        self._ticks = 0
        self._closed = threading.Event()
        self._beat = self._loop.call_later(tick_s, self._again)
        threading.Thread(target=self._watch, name="standstill", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._beat.cancel()

    def _again(self) -> None:
        self._ticks = 0
        self._beat = self._loop.call_later(self._tick_s, self._again)

    def _watch(self) -> None:
        told = False
        while not self._closed.wait(self._tick_s):
            self._ticks += 1
            still_s = self._ticks * self._tick_s
            if still_s < self._patience_s:
                told = False
            elif not told:
                told = True
                self._tell(still_s, self._place())
            if still_s >= self._limit_s:
                self._end(still_s, self._place())
                return

    def _place(self) -> str:
        """Where the loop's thread is, or else one of plain functions: the user's code if there is any on its stack."""
        frames = sys._current_frames()
        places = map(place_of, (frames.get(self._of), *plain_frames(frames)))
        return next(filter(None, places), "an unknown place")
