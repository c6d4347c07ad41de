"""What is done about rollouts that do not end together: one file a policy, one interface.

`docs/scheduling.md` says what each of them does, and `base` what the core asks.
"""

from __future__ import annotations

from paceline.core.scheduling.base import Desk, Rounds, Scheduling
from paceline.core.scheduling.choice import scheduling_of
from paceline.core.scheduling.overlap import Overlap
from paceline.core.scheduling.overprovision import Overprovision
from paceline.core.scheduling.synchronous import Synchronous

__all__ = ["Desk", "Overlap", "Overprovision", "Rounds", "Scheduling", "Synchronous", "scheduling_of"]
