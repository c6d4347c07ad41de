"""Notices that nothing happens, and says what waits longest and for what; ends a run that waits for nothing.

Every wait of a run has an end of its own: rollouts have deadlines, calls time-outs, workers and engines signs of life,
the trainer `trainer.step_s`. Until then this says where to look. That nothing at all is waited for, and nothing happens,
cannot be; if it is, the run must not stand still for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from paceline.core.scheduler import Core
from paceline.core.waits import progress, waits
from paceline.errors import InvariantError

_TICKS: Final = 12
"""How often it looks in the time after which it speaks."""
_MOST: Final = 4
"""Kinds of waits that are told."""


class QuietWatch:
    """Watches one core; `run` ends with InvariantError when the run stands still for good."""

    def __init__(
        self, core: Core, tell: Callable[[str], None], clock: Callable[[], float], quiet_s: float
    ) -> None:
        """`tell` is called after `quiet_s` seconds without progress, and again whenever that has doubled."""
        self._core, self._tell, self._clock, self._quiet_s = core, tell, clock, quiet_s

    async def run(self) -> None:
        core, tick_s = self._core, self._quiet_s / _TICKS
        seen, since, told_at, idle = progress(core), self._clock(), self._quiet_s, 0
        while True:
            await asyncio.sleep(tick_s)
            now = self._clock()
            if (news := progress(core)) != seen or core.finished:
                seen, since, told_at, idle = news, now, self._quiet_s, 0
                continue
            quiet_s = now - since
            found = waits(core)
            idle = 0 if found else idle + 1
            if idle > _TICKS:
                raise InvariantError(
                    f"the run stands still: nothing has happened for {quiet_s:.0f} s, and nothing is waited for; "
                    f"{core.fleet.free()} permits are free, {len(core.list)} rollouts are listed; please report "
                    "this, with the journal"
                )
            if quiet_s >= told_at:
                told_at = 2.0 * quiet_s
                why = "; ".join(wait.told(now) for wait in found[:_MOST]) or "nothing is waited for"
                self._tell(f"nothing has happened for {quiet_s:.0f} s: {why}")
