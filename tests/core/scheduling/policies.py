"""Each policy with the setup that fits it, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.core.scheduling import (
    Divided,
    KvArea,
    Overlap,
    Overprovision,
    Partial,
    Scheduling,
    Synchronous,
    TailRounds,
    UnbiasedTail,
)
from paceline.core.setup import CoreSetup
from paceline.testing import setup_for, train_env


class Kind(NamedTuple):
    make: Callable[[], Scheduling]
    lag: int = 0
    max_staleness: int = 0


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
    "unbiased_pinned": Kind(lambda: UnbiasedTail(5, "pinned")),
    "unbiased_learnt": Kind(lambda: UnbiasedTail(None, "pinned")),
    "unbiased_resume": Kind(lambda: UnbiasedTail(5, "resume"), max_staleness=32),
    "tail_rounds": Kind(lambda: TailRounds(1.25, 1.5)),
}


def setup_of(kind: Kind, **more: Any) -> CoreSetup:
    envs = more.pop("envs", (train_env(group_size=4, max_attempts=2),))
    return setup_for(*envs, lag=kind.lag, max_staleness=kind.max_staleness, **more)
