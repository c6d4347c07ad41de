"""A baseline: whole rollouts are paused at tool boundaries by what they hold, after ThunderAgent (arXiv:2602.13692).

Its rules, as its public router has them: a program may start or go on while the contexts of all active programs and a
reserve for each fit the KV cache; every 5 s, if they do not fit, programs are paused (those on a tool first, shortest
context first; one whose call is under way finishes it and is paused then) until they do; paused ones go on, before new
ones start, as soon as they fit, where a context that waits on a tool counts 2^-t after t seconds.

What differs here: it pauses the youngest rollouts, whose contexts are the shortest on the whole, and resumes the oldest,
which are the longest, because that is whom the core parks and resumes.
"""

from __future__ import annotations

from paceline.core.admission import Admission, Holdings
from paceline.core.flights import Flight
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo, EngineLoad

EVERY_S = 5.0


class ProgramCap(Admission):
    """One engine. Use it with a runner that lets calls under way finish."""

    def __init__(self, reserve: int, first: int) -> None:
        """`reserve`: tokens kept for what each program samples next; `first`: context of a new one."""
        self._reserve, self._first = reserve, first
        self._capacity = 0
        self._engine: Holdings | None = None
        self._now = self._checked = float("-inf")
        self._to_park = 0

    def joined(self, info: EngineInfo) -> None:
        self._capacity = info.kv_tokens or 0

    def started(self, engine: Holdings, flight: Flight, now: float) -> None:
        self._engine, self._now = engine, now

    def turn_asked(self, engine: Holdings, flight: Flight, now: float) -> None:
        self._engine, self._now = engine, now

    def segment_ended(
        self,
        engine: Holdings,
        flight: Flight,
        sampled: int,
        cached: int,
        seconds: float,
        error: str | None,
        now: float,
        *,
        is_busy: bool = False,
    ) -> None:
        self._engine, self._now = engine, now

    def ended(self, engine: Holdings, flight: Flight, now: float) -> None:
        self._engine, self._now = engine, now

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        self._engine, self._now = engine, now
        if now < self._checked + EVERY_S - 1e-6:
            return
        self._checked = now
        left = self._left(decay=False)
        shortest = sorted(f.context + self._reserve for f in engine.flights.values() if not f.parked)
        while left < 0 and shortest:
            left += shortest.pop(0)
            self._to_park += 1

    def _left(self, *, decay: bool) -> float:
        """Tokens of the cache that no active program holds."""
        if self._engine is None:
            return float(self._capacity)
        held = 0.0
        for flight in self._engine.flights.values():
            if flight.parked:
                continue
            acting = not flight.calling and not flight.at_gate
            fades = 2.0 ** -(self._now - flight.waits_since) if decay and acting and flight.turns else 1.0
            held += max(flight.context, self._first) * fades + self._reserve
        return self._capacity - held

    def cap(self, engine: EngineId) -> int:
        return 1024

    def room(self, engine: EngineId, active: int) -> int:
        if not active:
            return 1
        parked = [f.context for f in self._engine.flights.values() if f.parked] if self._engine else []
        needed = max(parked, default=self._first) + self._reserve
        return int(self._left(decay=True) >= needed)

    def to_park(self, engine: EngineId, active: int) -> int:
        found, self._to_park = self._to_park, 0
        return min(found, active - 1)

    def reason(self, engine: EngineId) -> str:
        return "contexts of active programs against the KV cache"
