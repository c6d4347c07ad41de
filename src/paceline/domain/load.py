"""What an engine says about itself."""

from __future__ import annotations

import msgspec

from paceline.domain.ids import EngineId
from paceline.errors import EngineError

_MOST = 2**63 - 1
"""A journal with larger numbers in it could not be read again."""


class EngineInfo(msgspec.Struct, frozen=True, gc=False):
    """Facts that do not change while an engine runs."""

    id: EngineId
    kv_tokens: int | None
    """KV-cache capacity in tokens; None when the engine does not say."""
    max_model_len: int | None
    """Longest context in tokens; None when the engine does not say."""

    def __post_init__(self) -> None:
        for what, number in (("a KV cache", self.kv_tokens), ("a longest context", self.max_model_len)):
            if number is not None and number > _MOST:
                raise EngineError(
                    f"engine {self.id} says that it has {what} of {number} tokens, above {_MOST}: look what answers there"
                )


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """One reading of an engine's metrics."""

    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks that running requests hold, 0 to 1; cached but idle blocks are not in it."""
    preemptions: int
    """Since the engine started."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache since the engine started."""
    prefix_hits: int = 0
    """Those of them that were found."""
    generated_tokens: int = 0
    """Since the engine started."""

    def __post_init__(self) -> None:
        counts = (
            self.running,
            self.waiting,
            self.preemptions,
            self.prefix_queries,
            self.prefix_hits,
            self.generated_tokens,
        )
        if max(counts) > _MOST:
            raise EngineError(
                f"its metrics have a count of {max(counts)}, above {_MOST}: look what answers there"
            )
