"""Seer's divided rollouts with context-aware scheduling (arXiv:2511.14617, algorithm 2).

Requests of `chunk_tokens`; the first member of each group is a probe, and probes come first, those that have sampled least;
then members of the group with the longest estimate, which is the longest of its finished rollouts. Or without that order, as
the paper measures division alone: groups as they came.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.line import Rank
from paceline.core.scheduling.ordered import Ordered
from paceline.domain.ids import GroupId
from paceline.domain.rollout import Rollout


class Divided(Ordered):
    """Shortest probe first, then the longest group first; or all in the order of their groups. Waits for the first in line if it
    fits nowhere."""

    def __init__(
        self, chunk_tokens: int, move_gap: float, order: Literal["longest", "arrival"] = "longest"
    ) -> None:
        super().__init__(chunk_tokens, move_gap)
        self._learns = order == "longest"
        self.estimates: dict[GroupId, int] = {}
        """Longest finished rollout of each open group of which one has finished."""

    def rank(self, group: OpenGroup, flight: Flight | None) -> Rank:
        if not self._learns:
            return (0.0, 0.0)  # equals come by group and member
        if flight is None:
            if not group.launched:
                return (0.0, 0.0)
        elif flight.id.member == 0:
            return (0.0, float(flight.sampled))
        return (1.0, -float(self.estimates.get(group.id, inf)))

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        super().rollout_ended(flight, rollout, group)
        if group.id not in self.desk.groups:
            self.estimates.pop(group.id, None)
        elif self._learns and rollout.outcome.ending in ("completed", "truncated"):
            self.estimates[group.id] = max(self.estimates.get(group.id, 0), flight.sampled)
            self.stale[group.id] = None
