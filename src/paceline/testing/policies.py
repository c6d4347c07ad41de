"""Every scheduling policy, by name, with the bounds that fit it: for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.core.scheduling import (
    Divided,
    KvArea,
    Overlap,
    Overprovision,
    Partial,
    Repeating,
    Scheduling,
    Synchronous,
    TailRounds,
    UnbiasedTail,
)


class Kind(NamedTuple):
    """A policy, and what its config would say of lag and staleness."""

    make: Callable[[], Scheduling]
    lag: int = 0
    max_staleness: int = 0
    algorithm: str = "grpo"


POLICIES: dict[str, Kind] = {
    "overlap": Kind(Overlap, lag=2, max_staleness=3),
    "synchronous": Kind(Synchronous),
    "overprovision_keep": Kind(lambda: Overprovision(1.5, "keep"), max_staleness=4),
    "overprovision_discard": Kind(lambda: Overprovision(1.5, "discard")),
    "partial_budget": Kind(lambda: Partial(3, 1.0), max_staleness=8),
    "partial_over_issue": Kind(lambda: Partial(None, 2.0), max_staleness=8),
    "divided": Kind(lambda: Divided(3, 0.25), max_staleness=3),
    "divided_ahead": Kind(lambda: Divided(2, 0.0), lag=1, max_staleness=4),
    "kv_area": Kind(lambda: KvArea(3, 0.25, 0.9, 0.75), lag=1, max_staleness=4),
    "unbiased_pinned": Kind(lambda: UnbiasedTail(5, "pinned"), algorithm="rloo"),
    "unbiased_learnt": Kind(lambda: UnbiasedTail(None, "pinned"), algorithm="rloo"),
    "unbiased_resume": Kind(lambda: UnbiasedTail(5, "resume"), max_staleness=32, algorithm="rloo"),
    "tail_rounds": Kind(lambda: TailRounds(1.25, 1.5)),
}
"""What storms choose from, whose seeds are written down: another one would make others of them."""

ALL_POLICIES: dict[str, Kind] = {**POLICIES, "repeating": Kind(Repeating)}
