"""More rollouts are started than a batch needs; the first to finish are the batch.

Late ones are kept for the next batch, or thrown away: then batches are skewed to short rollouts.
"""

from __future__ import annotations

import math
from typing import Literal

from paceline.core.groups import OpenGroup
from paceline.core.scheduling.base import Rounds
from paceline.domain.group import GroupResult


class Overprovision(Rounds):
    """`factor` times a batch in a round."""

    def __init__(self, factor: float, late: Literal["keep", "discard"]) -> None:
        super().__init__()
        self._factor = factor
        self._discards = late == "discard"
        self.hears_endings = self._discards

    @property
    def most(self) -> int:
        return math.ceil(self._factor * self.batch)

    def places(self) -> int:
        return self.most - self.desk.pacing.taken if self.is_open else 0

    def batch_cut(self) -> None:
        if self._discards:
            end_round(self, "late: its batch was full without it")

    def group_processed(self, group: OpenGroup, result: GroupResult) -> None:
        discard_if_late(self, group, result)


def end_round(policy: Rounds, why: str) -> None:
    """Throw away what the round that ends has not put into its batch: what runs, what is to start, what waits."""
    desk = policy.desk
    for group in desk.groups.groups():
        if group.task.split == "train" and group.owes_launches:
            desk.give_up(group)
    for flight in desk.flights.all():
        if flight.task.split == "train":
            desk.cancel(flight, "discarded", why)
    desk.discard(desk.list.waiting(), why)


def discard_if_late(policy: Rounds, group: OpenGroup, result: GroupResult) -> None:
    """A group of an earlier round, that was being processed when that ended."""
    if group.step <= policy.desk.cut:
        ids = [verdict.rollout for verdict in result.verdicts if verdict.fate == "queued"]
        policy.desk.discard(ids, "late: the round it was started for is over")
