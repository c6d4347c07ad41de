"""What is done about rollouts that do not end together: one file a policy, one interface.

`docs/scheduling.md` says what each of them does, and `base` what the core asks.
"""

from __future__ import annotations

from paceline.core.scheduling.base import Desk, Rounds, Scheduling
from paceline.core.scheduling.choice import scheduling_of
from paceline.core.scheduling.divided import Divided
from paceline.core.scheduling.kv_area import KvArea
from paceline.core.scheduling.overlap import Overlap
from paceline.core.scheduling.overprovision import Overprovision
from paceline.core.scheduling.partial import Partial
from paceline.core.scheduling.repeating import Repeating
from paceline.core.scheduling.synchronous import Synchronous
from paceline.core.scheduling.tail_rounds import TailRounds
from paceline.core.scheduling.unbiased_tail import UnbiasedTail

__all__ = [
    "Desk",
    "Divided",
    "KvArea",
    "Overlap",
    "Overprovision",
    "Partial",
    "Repeating",
    "Rounds",
    "Scheduling",
    "Synchronous",
    "TailRounds",
    "UnbiasedTail",
    "scheduling_of",
]
