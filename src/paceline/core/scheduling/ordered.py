"""Policies that choose anew, at every request of a few hundred or thousand tokens, which rollout runs and where.

members to start ─┐                       ┌─▶ a seat on an engine ─▶ one request ─┐
                  ├─▶ the best that fits ─┤                                       │
gave way ─────────┘                       └─ none fits: wait                      │
    ▲                                                                             │
    └── one that comes before it has no seat ◀── the request has ended, and more is to come
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from paceline.core.fleet import EngineState
from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.base import Scheduling
from paceline.core.scheduling.line import Lines, Name, Rank
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId
from paceline.domain.rollout import Rollout


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
    """Who comes first is `rank`; everything else is here.

    Who waits stands in lines, one for each of the orders that `keys` gives. A place in line changes only with its group:
    when a member starts, ends, fails, or tells something of how long the others will be. The group is then in `stale`, and its
    places are reckoned anew when somebody is chosen next. So a choice costs O(log n), with n groups and rollouts that wait.
    """

    has_order = True
    hears_turns = True
    hears_endings = True
    orders: ClassVar[int] = 1
    """How many orders there are."""
    ahead: ClassVar[float] = 1.0
    """Share of a request's tokens for which an engine must have room. By half of them they are there on average, since
    requests begin one by one: what is too much then gives way at the end of its own."""

    def __init__(self, chunk_tokens: int, move_gap: float) -> None:
        """`move_gap`: share of a KV cache by which another engine must be emptier for a rollout to move there."""
        self._chunk = chunk_tokens
        self._room = round(self.ahead * chunk_tokens)
        self._gap = move_gap
        self._open: dict[GroupId, OpenGroup] = {}
        self._standing: dict[RolloutId, Flight] = {}
        """Rollouts that gave way and wait for a seat."""
        self._standing_of: dict[GroupId, dict[RolloutId, Flight]] = {}
        """The same, by group."""
        self._lines = [Lines() for _ in range(self.orders)]
        self.stale: dict[GroupId, None] = {}
        """Groups of which something has changed that their places in line go by."""
        self._expected: dict[Name, float] = {}
        """Of each in line: tokens that it is expected to sample yet."""
        self._seats: dict[RolloutId, Seat] = {}
        self._reserved: dict[EngineId, int] = {}
        """Tokens of the seats of each engine."""

    @abstractmethod
    def rank(self, group: OpenGroup, flight: Flight | None) -> Rank:
        """Of a rollout, or of the next member of a group that starts."""

    def keys(self, group: OpenGroup, flight: Flight | None, remaining: float) -> tuple[Rank, ...]:
        """Its places in the orders."""
        return (self.rank(group, flight),)

    def candidates(self) -> Iterable[tuple[OpenGroup, Flight | None]]:
        """Those that may have the next seat, best first: one that fits may pass those before it that do not. Here only the
        first: the others wait for it."""
        for _, name in self._firsts(0, 1):
            yield self._named(name)

    def remaining(self, group: OpenGroup, have: int) -> float:
        """Tokens that a member which has sampled `have` is expected to sample yet; 0 where nothing is predicted."""
        return 0.0

    def fits(self, engine: EngineState, context: int, remaining: float) -> bool:
        """Whether an engine's memory has room for one more; one may always run. What takes more of both never fits where
        what takes less does not."""
        if engine.kv_tokens is None or not engine.active:
            return True
        return self._reserved.get(engine.id, 0) + context + self._room <= engine.kv_tokens

    # ── who waits ──

    def opened(self, group: OpenGroup) -> None:
        self._open[group.id] = group
        self.stale[group.id] = None

    def owes_again(self, group: OpenGroup) -> None:
        self.stale[group.id] = None

    def place(self, group: OpenGroup, flight: Flight | None, remaining: float) -> None:
        """Put it in line, or change its place."""
        if flight is None:
            name: Name = group.id
            env: EnvName | None = group.task.env
            among = (group.id, group.launched, 0)
        else:
            name, env, among = flight.id, None, flight.id
        self._expected[name] = remaining
        for lines, rank in zip(self._lines, self.keys(group, flight, remaining), strict=True):
            lines.of(env).put(name, (rank, among))

    def leave(self, name: Name, env: EnvName | None) -> None:
        """It does not wait any more, if it did."""
        self._expected.pop(name, None)
        for lines in self._lines:
            lines.of(env).drop(name)

    def _firsts(self, order: int, count: int) -> list[tuple[Rank, Name]]:
        """The first few of an order, with their ranks."""
        self._settle()
        found = self._lines[order].firsts(count, self._waits, self.desk.may_start)
        return [(key[0], name) for key, name in found]

    def _settle(self) -> None:
        """Reckon the places anew that have changed."""
        while self.stale:
            stale, self.stale = self.stale, {}
            for number in stale:
                group = self._open.get(number)
                if group is None:
                    continue
                if group.owes_launches:
                    self.place(group, None, self.remaining(group, 0))
                else:
                    self.leave(number, group.task.env)
                for flight in self._standing_of.get(number, {}).values():
                    self.place(group, flight, self.remaining(group, flight.sampled))

    def _waits(self, name: Name) -> bool:
        if isinstance(name, tuple):
            flight = self._standing.get(name)
            return flight is not None and flight.cancelled is None
        group = self._open.get(name)
        return group is not None and group.owes_launches

    def _named(self, name: Name) -> tuple[OpenGroup, Flight | None]:
        if isinstance(name, tuple):
            flight = self._standing[name]
            return self.desk.groups.of(flight.id), flight
        return self._open[name], None

    def _needs(self, group: OpenGroup, flight: Flight | None) -> tuple[int, float]:
        """Context it would begin with, and tokens it is expected to sample yet."""
        name: Name = group.id if flight is None else flight.id
        context, have = (self.first_context, 0) if flight is None else (flight.context, flight.sampled)
        expected = None if group.id in self.stale else self._expected.get(name)
        return context, self.remaining(group, have) if expected is None else expected

    # ── seats ──

    def seat_next(self) -> bool:
        too_large: list[tuple[int, float]] = []
        for group, flight in self.candidates():
            context, remaining = self._needs(group, flight)
            if any(context >= c and remaining >= r for c, r in too_large):
                continue
            engine = self._engine_for(group, context, remaining)
            if engine is None:
                too_large.append((context, remaining))
                continue
            if flight is None:
                flight = self.desk.start(group, engine)
                self.stale[group.id] = None
            else:
                self._go_on(flight)
                self.desk.release(flight, engine)
            self._sit(flight, engine.id, context, remaining)
            return True
        return False

    @property
    def first_context(self) -> int:
        """Tokens of a first prompt, as far as is known."""
        return self._first

    _first = 0

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

    def _sit(self, flight: Flight, engine: EngineId, context: int, remaining: float) -> Seat:
        self._rise(flight)
        seat = self._seats[flight.id] = Seat(engine, context + self._room, context, remaining)
        self._reserved[engine] = self._reserved.get(engine, 0) + seat.tokens
        return seat

    def _rise(self, flight: Flight) -> Seat | None:
        seat = self._seats.pop(flight.id, None)
        if seat is not None:
            self._reserved[seat.engine] -= seat.tokens
        return seat

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
        number = self.desk.groups.of(flight.id).id
        self._standing[flight.id] = flight
        self._standing_of.setdefault(number, {})[flight.id] = flight
        self.stale[number] = None
        self.desk.hold(flight, why)

    def _go_on(self, flight: Flight) -> None:
        """It does not stand any more, if it did."""
        if self._standing.pop(flight.id, None) is not None:
            number = self.desk.groups.of(flight.id).id
            mates = self._standing_of[number]
            del mates[flight.id]
            if not mates:
                del self._standing_of[number]
            self.leave(flight.id, None)

    def _gives_way(self, group: OpenGroup, flight: Flight) -> bool:
        """Whether one that comes before it waits, and no engine has a seat for that."""
        first = next(iter(self.candidates()), None)
        if first is None or self.rank(*first) >= self.rank(group, flight):
            return False
        return self._engine_for(first[0], *self._needs(*first)) is None

    # ── endings ──

    def left(self, flight: Flight) -> None:
        self._rise(flight)
        self._go_on(flight)

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        if group.id not in self.desk.groups:
            self._open.pop(group.id, None)
            self.leave(group.id, group.task.env)
