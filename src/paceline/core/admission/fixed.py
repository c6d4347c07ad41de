"""A fixed number of rollouts on each engine."""

from __future__ import annotations

from paceline.core.admission.base import Admission
from paceline.domain.ids import EngineId


class FixedCap(Admission):
    """The same cap for every engine, whatever it says."""

    learns = False

    def __init__(self, cap: int) -> None:
        self._cap = cap

    def cap(self, engine: EngineId) -> int:
        return self._cap

    def room(self, engine: EngineId, active: int) -> int:
        return self._cap - active

    def reason(self, engine: EngineId) -> str:
        return "fixed by the config"
