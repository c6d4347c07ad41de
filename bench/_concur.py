"""A baseline: the number of agents by additive increase and multiplicative decrease, after CONCUR (arXiv:2601.22705).

Once a reading: if less than `LOW` of the KV blocks are in use, `MORE` agents more may run; if more than `HIGH` are, and less
than `HITS` of the prompt tokens were found in the prefix cache since the last reading, `LESS` of them. Else as many as before.
The thresholds are those of a public re-implementation; the paper's own were not to be had.
"""

from __future__ import annotations

from paceline.core.admission import Admission, Holdings
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineLoad

MORE, LESS = 2, 0.5
LOW, HIGH, HITS = 0.2, 0.5, 0.2


class ConcurCap(Admission):
    """One engine."""

    def __init__(self, first: int) -> None:
        self._cap = float(first)
        self._before: EngineLoad | None = None

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        before, self._before = self._before, load
        if load is None or before is None:
            return
        asked = load.prefix_queries - before.prefix_queries
        hits = (load.prefix_hits - before.prefix_hits) / asked if asked else 1.0
        if load.kv_usage < LOW:
            self._cap += MORE
        elif load.kv_usage > HIGH and hits < HITS:
            self._cap = max(1.0, self._cap * LESS)

    def cap(self, engine: EngineId) -> int:
        return int(self._cap)

    def room(self, engine: EngineId, active: int) -> int:
        return self.cap(engine) - active

    def reason(self, engine: EngineId) -> str:
        return "by KV usage and hit rate"
