"""Keep the KV cache full to the end: what is critical first, else the shortest.

A batch under memory pressure takes (area under its KV tokens) / (what the caches hold), in steps of decoding, if they are
full all the time. Longest-first ends with short rollouts that cannot fill them, shortest-first with a long one. So a
rollout is *critical* when what is expected to remain of it is nearly as long as everything together will take; those go
first, and what they leave is filled with the shortest. Lengths are learnt (`lengths`), and an engine takes a rollout
only if the peak of what it will hold, by what is expected of each, stays within its cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.core.fleet import EngineState
from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.lengths import Lengths
from paceline.core.scheduling.ordered import Ordered, Rank, Seat
from paceline.domain.rollout import Rollout

_RECKON = 32
"""Seats taken before the time that is left is reckoned anew: it changes slowly, and costs a pass over all."""


class KvArea(Ordered):
    """`critical`: share of the time left that must remain of a rollout for it to go first. `fill`: share of the caches that
    is taken to be full on average."""

    passes_over: ClassVar[bool] = True
    has_rounds = True

    def __init__(self, chunk_tokens: int, move_gap: float, critical: float, fill: float) -> None:
        super().__init__(chunk_tokens, move_gap)
        self._critical = critical
        self._fill = fill
        self.lengths = Lengths()
        self._left = 0.0
        """Steps of decoding that everything which waits or runs will take."""
        self._picks = 0

    # ── who comes first ──

    def remaining(self, group: OpenGroup, have: int) -> float:
        lengths = self.lengths.of(group.task.env)
        if not lengths.knows:
            return 0.0
        return max(0.0, lengths.predict(group.id).expected(have) - have)

    def rank(self, group: OpenGroup, flight: Flight | None) -> Rank:
        have = 0 if flight is None else flight.sampled
        remaining = self.remaining(group, have)
        if self._left and remaining >= self._critical * self._left:
            return (0.0, -remaining)
        return (1.0, remaining)

    def seat_next(self) -> bool:
        if self._picks % _RECKON == 0:
            self._left = self._time_left()
        self._picks += 1
        return super().seat_next()

    def _time_left(self) -> float:
        """Area of what waits and runs, over what the caches hold of it in a step."""
        fleet = self.desk.fleet
        capacity = sum(e.kv_tokens or 0 for e in fleet.engines() if e.usable)
        if not capacity:
            return 0.0
        area = 0.0
        for group in self._open.values():
            if unstarted := group.unlaunched + len(group.retries):
                rest = self.remaining(group, 0)
                area += unstarted * rest * (self.first_context + rest / 2)
        for seat in self._seats.values():
            area += seat.remaining * (seat.context + seat.remaining / 2)
        for flight in self._standing.values():
            rest = self.remaining(self.desk.groups.of(flight.id), flight.sampled)
            area += rest * (flight.context + rest / 2)
        return area / (capacity * self._fill)

    # ── what fits ──

    def fits(self, engine: EngineState, context: int, remaining: float) -> bool:
        if engine.kv_tokens is None or not engine.active:
            return True
        seats = [seat for seat in self._seats.values() if seat.engine == engine.id]
        return peak([*seats, Seat(engine.id, 0, context, max(remaining, 1.0))]) <= engine.kv_tokens

    def turn_asked(self, flight: Flight) -> None:
        if flight.sampled:
            self.lengths.of(flight.task.env).running(flight.id.group, flight.id.member, flight.sampled)
        super().turn_asked(flight)

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        super().rollout_ended(flight, rollout, group)
        lengths = self.lengths.of(rollout.task.env)
        ending, cause = rollout.outcome.ending, rollout.outcome.cause
        if ending in ("completed", "truncated"):
            is_runaway = cause in ("tokens", "context")
            lengths.end(rollout.id.group, rollout.id.member, flight.sampled, is_runaway=is_runaway)
        elif ending == "cancelled":
            lengths.cut_off(rollout.id.group, rollout.id.member, flight.sampled)

    def batch_cut(self) -> None:
        for env, lengths in self.lengths.envs().items():
            if lengths.ended:
                self.desk.note_lengths(env, lengths)

    def snapshot(self) -> dict[str, Any]:
        return {"policy": "kv_area", "lengths": self.lengths.snapshot(), "first": self._first}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("policy") == "kv_area":
            self.lengths.restore(state["lengths"])
            self._first = state["first"]


def peak(seats: list[Seat]) -> float:
    """Most tokens held at once, if all sample one token a step and each ends when what is expected of it has come.

    Whoever ends first is at its longest then, and all that outlast it have grown by as much.
    """
    most, held = 0.0, 0.0
    for number, seat in enumerate(sorted(seats, key=lambda seat: -seat.remaining), start=1):
        held += seat.context
        most = max(most, held + number * seat.remaining)
    return most
