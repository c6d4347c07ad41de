"""A setup with the bounds of a policy, for tests."""

from __future__ import annotations

from typing import Any

from paceline.core.setup import CoreSetup
from paceline.testing import setup_for, train_env
from paceline.testing.policies import ALL_POLICIES as POLICIES
from paceline.testing.policies import Kind

__all__ = ["POLICIES", "Kind", "setup_of"]


def setup_of(kind: Kind, **more: Any) -> CoreSetup:
    envs = more.pop("envs", (train_env(group_size=4, max_attempts=2),))
    return setup_for(*envs, lag=kind.lag, max_staleness=kind.max_staleness, **more)
