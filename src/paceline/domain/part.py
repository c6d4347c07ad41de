"""Parts: what a rollout under way has sampled, engine request by engine request.

A rollout leaves one record, when it ends. Until then its parts are what is left of it if the orchestrator dies.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.rollout import Finish, VersionRuns


class Asked(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a turn was asked for beside its prompt. A recorded answer stands only for a call that asks for the same."""

    max_tokens: int
    """Over all requests of the turn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()


def sampled_crc(sampled_ids: NDArray[np.int32], before: int = 0) -> int:
    """Of what a rollout has sampled, request by request: `before` is that of the requests before this one."""
    return zlib.crc32(np.ascontiguousarray(sampled_ids, "<i4").data, before)


class Part(msgspec.Struct, frozen=True, gc=False):
    """One engine request that sampled something. Arrays are read-only; S ids were sampled."""

    rollout: RolloutId
    number: int
    """Counted from 0 over all such requests of the rollout, in every life of the run."""
    turn: int
    """Number of the turn that it is of."""
    before: int
    """Tokens that the turn had when the request began."""
    after: int
    """Number of the turn whose ids the prompt goes on from; -1 for a whole prompt."""
    prompt_ids: NDArray[np.int32]
    """int32[P], as in `Turn`; empty unless `before` is 0."""
    sampled_ids: NDArray[np.int32]
    """int32[S]."""
    logprobs: NDArray[np.float32]
    """float32[S]."""
    versions: VersionRuns
    finish: Finish
    """How the turn ended with it; `abort` where it was to go on."""
    asked: Asked
    engine: EngineId = ""
    cached_tokens: int = 0
    queued_s: float = 0.0
    """Seconds at the turn gate before it."""
    started: float = 0.0
    """When it was sent, in seconds of the run's clock."""
    ended: float = 0.0
    model_s: float = 0.0
    behind: int | None = None
    """`sampled_crc` of the parts that it goes on from: another life may have sampled something else there. None in parts of
    earlier releases."""

    @property
    def tokens(self) -> int:
        return len(self.sampled_ids)

    @property
    def end(self) -> int:
        """Tokens that the turn had when the request ended."""
        return self.before + len(self.sampled_ids)
