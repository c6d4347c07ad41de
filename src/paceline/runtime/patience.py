"""How long a turn puts up with an engine that cannot take its calls, before its rollout fails.

An engine that does not answer is taken out by the core after a few calls, and the turn goes on elsewhere: few failures
are enough. One that answers that it is busy (429) works off what it has, so its callers wait, longer each time: nothing
that was sampled is thrown away because an engine is overloaded. Not for ever: one that is busy for `MOST_BUSY_S` on end
serves somebody else. A run of which no engine takes any call is ended by the core (`core/refusals.py`).
"""

from __future__ import annotations

from typing import Final

from paceline.errors import EngineBusy, EngineUnavailable

MOST_UNAVAILABLE: Final = 8
"""Times one turn may find its engine unavailable. The core takes an engine out after a few failed calls in a row, so a
turn that meets this many is out of luck with several."""

MOST_BUSY_S: Final = 600.0
"""Seconds for which an engine may go on saying that it is busy: as long as a request may take by default."""

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 8.0


class Patience:
    """Of one turn."""

    __slots__ = ("_busy", "_busy_since", "_unavailable")

    def __init__(self) -> None:
        self._unavailable = 0
        self._busy = 0
        self._busy_since = 0.0

    def served(self) -> None:
        """The engine took a call: what it refused before does not count any more."""
        self._busy = 0

    def after(self, error: EngineUnavailable, now: float) -> float | None:
        """Seconds to wait before the turn asks again; None when it has asked long enough."""
        if not isinstance(error, EngineBusy):
            self._unavailable += 1
            return 0.0 if self._unavailable < MOST_UNAVAILABLE else None
        if not self._busy:
            self._busy_since = now
        self._busy += 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._busy - 1))
        return wait_s if now + wait_s < self._busy_since + MOST_BUSY_S else None
