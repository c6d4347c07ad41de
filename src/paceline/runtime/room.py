"""What cannot be written for want of room holds the run, until there is room or patience ends.

journal thread ─ missing, found ─┐            ┌─▶ RunHeld ─▶ core: nothing starts, no call begins
batches, checkpoints ─ insist ───┴─▶ Room ────┼─▶ tell: why, and what to do
                                              └─▶ fail: it was too long
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from paceline.domain.events import RunHeld
from paceline.errors import PacelineError, is_full

T = TypeVar("T")

RETRY_S: Final = 1.0


class NoRoom(PacelineError):
    """Something could not be written for longer than the run waits."""


class Room:
    """Who waits for room to write, and since when. For one loop."""

    def __init__(
        self,
        *,
        post: Callable[[RunHeld], None],
        tell: Callable[[str], None],
        fail: Callable[[NoRoom], None],
        limit_s: float,
        retry_s: float = RETRY_S,
    ) -> None:
        """`fail` is told, at most once, when somebody has waited for `limit_s` seconds without a sign of progress."""
        self._loop = asyncio.get_running_loop()
        self._post, self._tell, self._fail = post, tell, fail
        self._limit_s, self._retry_s = limit_s, retry_s
        self._missing: dict[str, tuple[str, float]] = {}
        """What cannot be written: why, and by when it must be."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> str:
        """What the run waits for; empty while it waits for nothing."""
        return "; ".join(f"{what}: {why}" for what, (why, _) in self._missing.items())

    def missing(self, what: str, why: str) -> None:
        """`what` cannot be written. Said again, it is slow and not stuck: its time begins anew."""
        is_new = what not in self._missing
        self._missing[what] = (why, self._loop.time() + self._limit_s)
        if is_new:
            self._changed()

    def found(self, what: str) -> None:
        """It can be written again, or was never missing."""
        if self._missing.pop(what, None) is not None:
            self._changed()

    async def insist(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until there is room. Raises whatever else `attempt` raises."""
        while True:
            try:
                result = await attempt()
            except OSError as error:
                if not is_full(error):
                    raise
                if what not in self._missing:
                    self.missing(what, str(error))
                await asyncio.sleep(self._retry_s)
            else:
                self.found(what)
                return result

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self) -> None:
        held = self.held
        self._post(RunHeld(held))
        if held:
            self._tell(f"held: {held}; nothing new starts, and it goes on by itself when that can be written")
        else:
            self._tell("what could not be written was written: the run goes on")
        if self._timer is None and held:
            self._arm()

    def _arm(self) -> None:
        self._timer = self._loop.call_at(min(by for _, by in self._missing.values()), self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._missing:
            return
        what, (why, by) = min(self._missing.items(), key=lambda item: item[1][1])
        if self._loop.time() < by:
            self._arm()
            return
        self._fail(
            NoRoom(
                f"{what} could not be written for {self._limit_s:g} s: {why}; make room on the disk, or mend it, and go on "
                "with --resume; journal.full_disk_s is how long a run waits"
            )
        )
