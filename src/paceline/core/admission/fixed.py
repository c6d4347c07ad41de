"""A fixed number of rollouts on each engine."""

from __future__ import annotations

from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo, EngineLoad


class FixedCap:
    """The same cap for every engine, whatever it says."""

    __slots__ = ("_cap",)

    def __init__(self, cap: int) -> None:
        self._cap = cap

    def joined(self, info: EngineInfo) -> None:
        """Nothing to learn from it."""

    def observe(self, engine: EngineId, load: EngineLoad | None, in_flight: int, now: float) -> None:
        """Nothing to learn from it."""

    def cap(self, engine: EngineId) -> int:
        return self._cap
