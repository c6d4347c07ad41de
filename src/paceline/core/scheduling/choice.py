"""The policy that a config names."""

from __future__ import annotations

from paceline.config import OverprovisionScheduling, RunConfig, SynchronousScheduling
from paceline.core.scheduling.base import Scheduling
from paceline.core.scheduling.overlap import Overlap
from paceline.core.scheduling.overprovision import Overprovision
from paceline.core.scheduling.synchronous import Synchronous


def scheduling_of(config: RunConfig) -> Scheduling:
    """The policy of `[scheduling]`, for one core."""
    section = config.scheduling
    if isinstance(section, SynchronousScheduling):
        return Synchronous()
    if isinstance(section, OverprovisionScheduling):
        return Overprovision(section.factor, section.late)
    return Overlap()
