"""RollPacker's tail batching, as published (arXiv:2509.21009, section 4.1).

Short rounds race more tasks, and more rollouts of each, than a batch needs; tasks that lose wait for a long round, where
they are run anew. What it trains on is shorter than what the policy says: `docs/scheduling.md` says why.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.base import Rounds
from paceline.domain.commands import PutOff
from paceline.domain.group import GroupResult
from paceline.domain.ids import GroupId, RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef

_LATE = "the round ended before its task was complete: it is run anew in a long round"


class TailRounds(Rounds):
    """`prompts` times the tasks of a batch, `responses` times the rollouts of a task, in a short round."""

    hears_endings = True

    def __init__(self, prompts: float, responses: float) -> None:
        super().__init__()
        self._prompts = prompts
        self._responses = responses
        self.is_long = False
        self._has_looked = False
        """Whether it has seen what an earlier life of the run left."""
        self._done: dict[GroupId, tuple[TaskRef, int]] = {}
        """Tasks of this round whose rollouts may wait in the list, with their group size."""

    @property
    def most(self) -> int:
        return math.ceil(self._prompts * self.batch)

    def advance(self) -> None:
        if not self._has_looked and not self.desk.fleet.is_empty:
            # Their round ended in an earlier life, which put their tasks off, and was killed before they had stopped. Which
            # of them go on at all is known when the first engine is there.
            self._has_looked = True
            for group in [g for g in self.desk.groups.groups() if g.task.split == "train"]:
                if group.step <= self.desk.cut:
                    self._stop(group, _LATE)
        super().advance()

    def open_round(self) -> None:
        desk = self.desk
        waiting = sum(kept.size for kept in desk.kept.values())
        self.is_long = waiting >= self.batch or (waiting > 0 and desk.out_of_tasks)
        self._done.clear()

    def places(self) -> int:
        if not self.is_open:
            return 0
        return (self.batch if self.is_long else self.most) - self.desk.pacing.taken

    def members(self, group_size: int) -> tuple[int, int]:
        if self.is_long:
            return group_size, group_size
        return max(group_size, int(self._responses * group_size)), group_size

    def next_put_off(self) -> PutOff | None:
        if self.is_long or self.desk.out_of_tasks:
            return next(iter(self.desk.kept.values()))
        return None

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        if group.size == group.needs or group.id not in self.desk.groups:
            return
        ended = sum(r.outcome.ending in ("completed", "truncated") for r in group.arrived)
        if ended >= group.needs:
            self._stop(group, f"its task is complete: {ended} of {group.size} have ended")

    def group_processed(self, group: OpenGroup, result: GroupResult) -> None:
        listed = [verdict.rollout for verdict in result.verdicts if verdict.fate == "queued"]
        if group.step <= self.desk.cut:
            self.desk.discard(listed, _LATE)
        elif listed:
            self._done[group.id] = (group.task, group.needs)

    def batch_cut(self) -> None:
        desk = self.desk
        # Before others close by being stopped.
        closed = [g for g in desk.processing.values() if g.step <= desk.cut]
        for group in [g for g in desk.groups.groups() if g.task.split == "train"]:
            self._put_off(group.task, group.needs)
            self._stop(group, _LATE)
        for group in closed:
            self._put_off(group.task, group.needs)
        left: dict[GroupId, list[RolloutId]] = {}
        for rollout in desk.list.waiting():
            left.setdefault(rollout.group, []).append(rollout)
        for number, rollouts in left.items():
            task, size = self._done.get(number, (None, 0))
            if task is not None and len(rollouts) >= size:
                self._put_off(task, size)
            desk.discard(rollouts, _LATE)

    def _put_off(self, task: TaskRef, size: int) -> None:
        self.desk.put_off(task, size, _LATE)

    def _stop(self, group: OpenGroup, why: str) -> None:
        desk = self.desk
        for flight in desk.flights_of(group):
            desk.cancel(flight, "discarded", why)
        desk.give_up(group)

    def snapshot(self) -> dict[str, Any]:
        done = {str(n): [t.env, t.split, t.index, t.epoch, size] for n, (t, size) in self._done.items()}
        return {"policy": "tail_rounds", "done": done}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("policy") == "tail_rounds":
            self._done = {int(n): (TaskRef(*row[:4]), row[4]) for n, row in state["done"].items()}
