"""A token budget for each rollout and round; what is unfinished goes on in the next.

Kimi k1.5 (arXiv:2501.12599, section 2.6.2) gives every rollout a fixed budget an iteration and saves what is unfinished.
APRIL (arXiv:2509.18521) over-issues whole groups, aborts what runs when enough have completed, and lets that go on first.
"""

from __future__ import annotations

import math

from paceline.core.flights import Flight
from paceline.core.scheduling.base import Rounds


class Partial(Rounds):
    """`budget_tokens` a rollout and round, `over_issue` batches of fresh rollouts a round; see `docs/scheduling.md`."""

    hears_turns = True

    def __init__(self, budget_tokens: int | None, over_issue: float) -> None:
        super().__init__()
        self._budget = budget_tokens
        self._over_issue = over_issue
        self._limit = 0
        """Places that may be taken in this round, by what goes on and what is fresh."""

    @property
    def most(self) -> int:
        return max(self._limit, math.ceil(self._over_issue * self.batch))

    def places(self) -> int:
        return self._limit - self.desk.pacing.taken if self.is_open else 0

    def open_round(self) -> None:
        desk = self.desk
        fresh = math.ceil(self._over_issue * self.batch) - len(desk.list)
        if self._budget is None:
            # APRIL: what goes on is part of what is issued.
            fresh -= desk.pacing.taken - len(desk.list)
        self._go_on(fresh)

    def advance(self) -> None:
        super().advance()
        desk = self.desk
        if self._budget is None or not self.is_open or desk.owing or desk.processing or desk.list.ready():
            return
        if desk.flights.trains and not desk.flights.is_training:
            # All have used up their budgets, and the batch is not full: another round without a step.
            self._go_on(math.ceil(self._over_issue * self.batch) - len(desk.list))

    def _go_on(self, fresh: int) -> None:
        desk = self.desk
        self._limit = desk.pacing.taken + max(0, fresh)
        for flight in desk.flights.trains_now():
            flight.mark = flight.sampled
            desk.release(flight)

    def batch_cut(self) -> None:
        for flight in self.desk.flights.trains_now():
            self.desk.hold(flight, "the batch is full: it goes on in the next round")

    def budget(self, flight: Flight) -> int | None:
        limit = self.desk.setup.segment_tokens
        if self._budget is None:
            return limit
        left = max(1, self._budget - (flight.sampled - flight.mark))
        return left if limit is None else min(left, limit)

    def turn_asked(self, flight: Flight) -> None:
        if self._budget is not None and flight.sampled - flight.mark >= self._budget:
            self.desk.hold(flight, f"its {self._budget} tokens of this round are used up")
