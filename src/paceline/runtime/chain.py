"""One model call as a chain of engine requests: what is known of it between one request and the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EngineId
from paceline.domain.part import Asked
from paceline.runtime.patience import Patience

Tell: TypeAlias = Callable[[Sequence[int]], None]
"""Is given ids as they are sampled."""

_NOTHING_ASKED: Final = Asked(0)


class Chain:
    """What adds up over the requests of one model call."""

    __slots__ = (
        "asked",
        "empty",
        "ended",
        "engine",
        "heard",
        "patience",
        "queued_s",
        "seed",
        "segments",
        "started",
        "stop",
        "tell",
    )

    def __init__(self, seed: int, stop: tuple[str, ...], tell: Tell | None) -> None:
        self.tell = tell
        self.heard = 0
        """Tokens of the request under way that have been told."""
        self.seed = seed
        self.stop = stop
        """Strings that end it."""
        self.asked = _NOTHING_ASKED
        self.engine: EngineId = ""
        self.queued_s = 0.0
        self.started = 0.0
        self.ended = 0.0
        """When its latest request ended, if that is from a record; 0 if it is not."""
        self.segments = 0
        self.empty = 0
        self.patience = Patience()

    def hear(self, ids: Sequence[int]) -> None:
        """The engine of the request under way tells what it samples."""
        assert self.tell is not None
        self.heard += len(ids)
        self.tell(ids)

    def hear_whole(self, ids: NDArray[np.int32]) -> None:
        """The request has ended with these."""
        if self.tell is not None and len(ids) > self.heard:
            self.tell(ids[self.heard :].tolist())
