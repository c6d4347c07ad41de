"""Policies that choose anew, at every request of a few hundred or thousand tokens, which rollout runs and where.

members to start ─┐                       ┌─▶ a seat on an engine ─▶ one request ─┐
                  ├─▶ the best that fits ─┤                                       │
gave way ─────────┘                       └─ none fits: wait                      │
    ▲                                                                             │
    └── one that comes before it has no seat ◀── the request has ended, and more is to come
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias

from paceline.core.fleet import EngineState
from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.base import Scheduling
from paceline.domain.ids import EngineId, GroupId, RolloutId
from paceline.domain.rollout import Rollout

Rank: TypeAlias = tuple[float, float]
"""Smaller comes first."""


class Seat:
    """What a rollout holds of an engine's KV cache."""

    __slots__ = ("context", "engine", "remaining", "tokens")

    def __init__(self, engine: EngineId, tokens: int, context: int, remaining: float) -> None:
        self.engine = engine
        self.tokens = tokens
        """Context, and what the request under way may add."""
        self.context = context
        self.remaining = remaining
        """Tokens that it is expected to sample yet."""


class Ordered(Scheduling, ABC):
    """Who comes first is `rank`; everything else is here."""

    has_order = True
    hears_turns = True
    hears_endings = True
    passes_over: ClassVar[bool]
    """Whether one that fits may start before one that comes first and does not fit."""

    def __init__(self, chunk_tokens: int, move_gap: float) -> None:
        """`move_gap`: share of a KV cache by which another engine must be emptier for a rollout to move there."""
        self._chunk = chunk_tokens
        self._gap = move_gap
        self._open: dict[GroupId, OpenGroup] = {}
        self._standing: dict[RolloutId, Flight] = {}
        """Rollouts that gave way and wait for a seat."""
        self._seats: dict[RolloutId, Seat] = {}
        self._reserved: dict[EngineId, int] = {}
        """Tokens of the seats of each engine."""

    @abstractmethod
    def rank(self, group: OpenGroup, flight: Flight | None) -> Rank:
        """Of a rollout, or of the next member of a group that starts."""

    def remaining(self, group: OpenGroup, have: int) -> float:
        """Tokens that a member which has sampled `have` is expected to sample yet; 0 where nothing is predicted."""
        return 0.0

    def fits(self, engine: EngineState, context: int, remaining: float) -> bool:
        """Whether an engine's memory has room for one more; one may always run."""
        if engine.kv_tokens is None or not engine.active:
            return True
        return self._reserved.get(engine.id, 0) + context + self._chunk <= engine.kv_tokens

    # ── seats ──

    def opened(self, group: OpenGroup) -> None:
        self._open[group.id] = group

    def seat_next(self) -> bool:
        ranked = self._ranked()
        if not ranked:
            return False
        if self.passes_over:
            ranked.sort()
        else:
            ranked = [min(ranked)]
        for _, _, group, flight in ranked:
            have = 0 if flight is None else flight.sampled
            context = self.first_context if flight is None else flight.context
            remaining = self.remaining(group, have)
            engine = self._engine_for(group, context, remaining)
            if engine is None:
                continue
            if flight is None:
                flight = self.desk.start(group, engine)
            else:
                del self._standing[flight.id]
                self.desk.release(flight, engine)
            self._sit(flight, engine.id, context, remaining)
            return True
        return False

    @property
    def first_context(self) -> int:
        """Tokens of a first prompt, as far as is known."""
        return self._first

    _first = 0

    def _ranked(self) -> list[tuple[Rank, RolloutId | tuple[int, int, int], OpenGroup, Flight | None]]:
        desk = self.desk
        found: list[tuple[Rank, Any, OpenGroup, Flight | None]] = [
            (self.rank(group, None), (group.id, group.launched, 0), group, None)
            for group in self._open.values()
            if group.owes_launches and desk.may_start(group.task.env)
        ]
        for flight in self._standing.values():
            if flight.cancelled is None:
                group = desk.groups.of(flight.id)
                found.append((self.rank(group, flight), flight.id, group, flight))
        return found

    def _engine_for(self, group: OpenGroup, context: int, remaining: float) -> EngineState | None:
        """Where its group is, if it fits there, for the sake of the prompt in its cache; else where most is free."""
        fleet = self.desk.fleet
        best, most = None, float("-inf")
        for engine in fleet.engines():
            if not engine.usable or fleet.room(engine) <= 0 or not self.fits(engine, context, remaining):
                continue
            if engine.id == group.engine:
                return engine
            free = self._free(engine)
            if free > most:
                best, most = engine, free
        return best

    def _free(self, engine: EngineState) -> float:
        """Share of its KV cache, or of its permits where it does not tell its capacity, that is free."""
        if engine.kv_tokens is None:
            room = self.desk.fleet.room(engine)
            return room / max(1, room + engine.active)
        return 1 - self._reserved.get(engine.id, 0) / engine.kv_tokens

    def _sit(self, flight: Flight, engine: EngineId, context: int, remaining: float) -> None:
        self._rise(flight)
        tokens = context + self._chunk
        self._seats[flight.id] = Seat(engine, tokens, context, remaining)
        self._reserved[engine] = self._reserved.get(engine, 0) + tokens

    def _rise(self, flight: Flight) -> None:
        seat = self._seats.pop(flight.id, None)
        if seat is not None:
            self._reserved[seat.engine] -= seat.tokens

    # ── requests ──

    def budget(self, flight: Flight) -> int | None:
        return self._chunk

    def turn_asked(self, flight: Flight) -> None:
        desk = self.desk
        group = desk.groups.of(flight.id)
        remaining = self.remaining(group, flight.sampled)
        self._sit(flight, flight.engine, flight.context, remaining)
        if flight.turns <= 1 and not flight.continues:
            self._first = round(0.9 * self._first + 0.1 * flight.context) if self._first else flight.context
            return
        engine = desk.fleet[flight.engine]
        if engine.out is not None:
            return  # it is placed elsewhere at the gate
        if self._gives_way(group, flight):
            self._stand(flight, "one that comes before it waits for a seat")
        elif engine.kv_tokens is not None and self._reserved[engine.id] > engine.kv_tokens:
            other = self._other(engine, flight.context, remaining, float("-inf"))
            if other is not None:
                self._move(flight, other, remaining)
            elif engine.active > 1:
                self._stand(flight, f"the KV cache of {engine.id} is full, and so are the others")
        elif len(desk.fleet.engines()) > 1:
            other = self._other(engine, flight.context, remaining, self._free(engine) + self._gap)
            if other is not None:
                self._move(flight, other, remaining)

    def _other(self, engine: EngineState, context: int, remaining: float, least: float) -> EngineState | None:
        """Another engine with room, more of which is free than `least`."""
        fleet = self.desk.fleet
        best = None
        for each in fleet.engines():
            if each is engine or not each.usable or fleet.room(each) <= 0:
                continue
            free = self._free(each)
            if free > least and self.fits(each, context, remaining):
                best, least = each, free
        return best

    def _move(self, flight: Flight, engine: EngineState, remaining: float) -> None:
        self.desk.move(flight, engine)
        self._sit(flight, engine.id, flight.context, remaining)

    def _stand(self, flight: Flight, why: str) -> None:
        self._rise(flight)
        self._standing[flight.id] = flight
        self.desk.hold(flight, why)

    def _gives_way(self, group: OpenGroup, flight: Flight) -> bool:
        """Whether one that comes before it waits, and no engine has a seat for that."""
        ranked = self._ranked()
        if not ranked:
            return False
        rank, _, other, waiting = min(ranked)
        if rank >= self.rank(group, flight):
            return False
        context = self.first_context if waiting is None else waiting.context
        have = 0 if waiting is None else waiting.sampled
        return self._engine_for(other, context, self.remaining(other, have)) is None

    # ── endings ──

    def left(self, flight: Flight) -> None:
        self._rise(flight)
        self._standing.pop(flight.id, None)

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        if group.id not in self.desk.groups:
            self._open.pop(group.id, None)
