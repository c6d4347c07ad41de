"""The turn gate: the one door through which model calls reach an engine."""

from __future__ import annotations

import asyncio
from typing import Protocol

from paceline.domain.commands import GrantTurn
from paceline.domain.events import SegmentEnded, TurnRequested


class TurnGate(Protocol):
    """Asks the core for a model call. The driver implements it."""

    def request(self, event: TurnRequested) -> GrantTurn | asyncio.Future[GrantTurn]:
        """Ask for one engine request: granted at once, or when the future is set.

        Whoever asked may cancel the future, and has then no more part in it: a grant that comes all the same is
        answered by the gate, with a `SegmentEnded` that sampled nothing.
        """
        ...

    def report(self, event: SegmentEnded) -> None:
        """The request that was granted has ended. Exactly once for each grant that was received."""
        ...
