"""Each policy with the setup that fits it, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.core.scheduling import Overlap, Overprovision, Scheduling, Synchronous
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
}


def setup_of(kind: Kind, **more: Any) -> CoreSetup:
    envs = more.pop("envs", (train_env(group_size=4, max_attempts=2),))
    return setup_for(*envs, lag=kind.lag, max_staleness=kind.max_staleness, **more)
