"""The policy that a config names."""

from __future__ import annotations

from paceline.config import (
    DividedScheduling,
    KvAreaScheduling,
    OverprovisionScheduling,
    PartialScheduling,
    RunConfig,
    SynchronousScheduling,
    TailRoundsScheduling,
    UnbiasedTailScheduling,
)
from paceline.core.scheduling.base import Scheduling
from paceline.core.scheduling.divided import Divided
from paceline.core.scheduling.kv_area import KvArea
from paceline.core.scheduling.overlap import Overlap
from paceline.core.scheduling.overprovision import Overprovision
from paceline.core.scheduling.partial import Partial
from paceline.core.scheduling.repeating import Repeating
from paceline.core.scheduling.synchronous import Synchronous
from paceline.core.scheduling.tail_rounds import TailRounds
from paceline.core.scheduling.unbiased_tail import UnbiasedTail


def scheduling_of(config: RunConfig) -> Scheduling:
    """The policy of `[scheduling]`, for one core."""
    section = config.scheduling
    if isinstance(section, SynchronousScheduling):
        return Repeating() if config.run.deterministic else Synchronous()
    if isinstance(section, OverprovisionScheduling):
        return Overprovision(section.factor, section.late)
    if isinstance(section, PartialScheduling):
        return Partial(section.budget_tokens, section.over_issue)
    if isinstance(section, TailRoundsScheduling):
        return TailRounds(section.prompts, section.responses)
    if isinstance(section, UnbiasedTailScheduling):
        return UnbiasedTail(section.cutoff_tokens, config.late)
    if isinstance(section, DividedScheduling):
        return Divided(section.chunk_tokens, section.move_gap, section.order)
    if isinstance(section, KvAreaScheduling):
        return KvArea(section.chunk_tokens, section.move_gap, section.critical, section.fill)
    return Overlap()
