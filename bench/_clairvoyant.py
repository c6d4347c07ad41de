"""A yardstick: a cap that was chosen for each stretch of time beforehand, by who knows how the workload will drift."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.admission import Admission, Holdings
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineLoad


class ScheduledCap(Admission):
    """One engine. The next cap holds from the first reading of its stretch on."""

    def __init__(self, caps: Sequence[int], stretch_s: float) -> None:
        self._caps, self._stretch_s = caps, stretch_s
        self._cap = caps[0]

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        self._cap = self._caps[min(len(self._caps) - 1, int(now / self._stretch_s))]

    def cap(self, engine: EngineId) -> int:
        return self._cap

    def room(self, engine: EngineId, active: int) -> int:
        return self._cap - active

    def reason(self, engine: EngineId) -> str:
        return "chosen for this stretch beforehand"
