"""What every admission controller offers."""

from __future__ import annotations

from typing import Protocol

from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo, EngineLoad


class Admission(Protocol):
    """Decides a cap for each engine from what it says of itself."""

    def joined(self, info: EngineInfo) -> None:
        """A new engine, or one that is back."""
        ...

    def observe(self, engine: EngineId, load: EngineLoad | None, in_flight: int, now: float) -> None:
        """A reading of its metrics; None when it did not answer, which is never read as free."""
        ...

    def cap(self, engine: EngineId) -> int:
        """Rollouts it may hold now."""
        ...
