"""A prompt, and what the trainer's weights make of it."""

from __future__ import annotations

import msgspec


class Probe(msgspec.Struct, frozen=True, gc=False):
    """One prompt of a published version."""

    token_ids: list[int]
    next: list[tuple[int, float]]
    """The most likely next tokens, best first, with their natural logprobs at temperature 1. Several, because two that
    are nearly equal may change places by rounding."""
