"""An admission that parks: what holds of rollouts that are taken off their engine is tried with it."""

from __future__ import annotations

from paceline.core.admission import Admission, Holdings
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineLoad


class Halves(Admission):
    """Takes half of what runs off at every third reading, and lets it go on at the next."""

    def __init__(self, most: int) -> None:
        """`most` rollouts run at once."""
        self.readings = 0
        self._most = most

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        self.readings += 1

    def cap(self, engine: EngineId) -> int:
        return self._most // 2 if self.readings % 3 == 0 else self._most

    def room(self, engine: EngineId, active: int) -> int:
        return self.cap(engine) - active

    def to_park(self, engine: EngineId, active: int) -> int:
        return max(0, active - self.cap(engine))

    def reason(self, engine: EngineId) -> str:
        return "half of them"
