"""What an engine says about itself."""

from __future__ import annotations

import msgspec

from paceline.domain.ids import EngineId


class EngineInfo(msgspec.Struct, frozen=True, gc=False):
    """Facts that do not change while an engine runs."""

    id: EngineId
    kv_tokens: int | None
    """KV-cache capacity in tokens; None when the engine does not say."""
    max_model_len: int | None
    """Longest context in tokens; None when the engine does not say."""


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
