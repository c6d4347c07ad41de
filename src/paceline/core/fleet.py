"""Which engines there are, which version each holds, and who waits at its gate.

An engine's version flips in one place, `loaded`, when the engine said so. While it loads, turns that want it wait at
its gate; they are let through, oldest rollout first, when it is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from paceline.core.admission import Admission
from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.placement import Placement
from paceline.core.refusals import Refusals
from paceline.domain.events import EngineJoined, WeightsLoaded
from paceline.domain.ids import EngineId, EnvName, RolloutId, Version
from paceline.errors import EngineError, InvariantError

FAILED_CALLS = 3
"""Calls in a row that may fail before an engine is taken out."""

SILENT_READINGS = 12
"""Readings of its metrics in a row that an engine may leave unanswered before it is taken out. One that hangs fails no
call for as long as its clients are patient; a reading gives up after seconds."""

LOAD_ATTEMPTS = 3
"""Times an engine may fail to load a version before it is taken out."""


class EngineState:
    """One engine."""

    __slots__ = (
        "attempts",
        "calling_tokens",
        "calls",
        "calls_to_stop",
        "failed_calls",
        "flights",
        "held",
        "id",
        "in_flight",
        "is_stale",
        "kv_tokens",
        "loading",
        "noted",
        "number",
        "out",
        "parked",
        "parked_line",
        "ready",
        "refusals",
        "room",
        "silent_readings",
        "speaks",
        "stale",
        "strays",
        "waiting",
        "working_tokens",
    )

    def __init__(
        self, engine: EngineId, held: Version, ready: bool, number: int, stale: list[EngineState]
    ) -> None:
        self.id = engine
        self.held = held
        self.ready = ready
        """False for one that joined with older weights, until it has loaded the current ones."""
        self.number = number
        """Its place among the engines, by when it first joined."""
        self.stale = stale
        """The fleet's: engines whose `room` is out of date."""
        self.is_stale = False
        """Whether it is one of them."""
        self.room = 0
        """Rollouts that could start on it when that was last looked at; nought while it is not usable."""
        self.kv_tokens: int | None = None
        """KV-cache capacity; None where it does not say."""
        self.out: str | None = None
        """Why it is not used any more."""
        self.loading: Version | None = None
        self.attempts = 0
        self.in_flight = 0
        """Rollouts placed on it, parked ones included."""
        self.flights: dict[RolloutId, Flight] = {}
        """Those rollouts."""
        self.parked = 0
        """Those of them that are parked."""
        self.parked_line: list[Flight] = []
        """Heap of the parked ones, oldest first; some may have been resumed, held, or have ended since."""
        self.calls = 0
        """Engine requests under way."""
        self.calling_tokens = 0
        """Contexts of the calls under way, as they were when the calls began: what cannot be evicted."""
        self.working_tokens = 0
        """Contexts of all rollouts that are not parked, those between turns included."""
        self.noted: tuple[int, str] = (0, "")
        """Cap and reason that the journal knows."""
        self.calls_to_stop = 0
        """Calls of cancelled rollouts that have not stopped: they must, before its weights may change."""
        self.speaks = False
        """Whether it has ever answered a reading of its metrics; not every engine has any."""
        self.silent_readings = 0
        """Readings in a row without an answer."""
        self.failed_calls = 0
        """Calls in a row that failed."""
        self.refusals: Refusals | None = None
        """Of an engine that has said it is busy since anything of it came."""
        self.strays = 0
        """Updates under way when it was lost: their answers are still to come, and say nothing."""
        self.waiting: list[Flight] = []
        """Heap of the rollouts at its gate, oldest first; some may have ended, moved or been parked since."""

    @property
    def usable(self) -> bool:
        return self.ready and self.out is None

    @property
    def active(self) -> int:
        """Rollouts that its cap counts: parked ones hold no permit."""
        return self.in_flight - self.parked

    def takes_none(self, wait_s: float, now: float) -> bool:
        """Whether it has refused all calls for `wait_s`, goes on to, and is at work on none that it took before."""
        refusals = self.refusals
        if refusals is None or now - refusals.last > refusals.within_s:
            return False
        return now - refusals.since >= max(wait_s, refusals.within_s) and not any(
            flight.calling and refusals.took(flight.granted_at) for flight in self.flights.values()
        )

    def touch(self) -> None:
        """What it holds has changed, or its controller was told something: its room may be another."""
        if not self.is_stale:
            self.is_stale = True
            self.stale.append(self)

    def add(self, flight: Flight) -> None:
        """Place a rollout here."""
        self.touch()
        flight.engine = self.id
        self.in_flight += 1
        self.flights[flight.id] = flight
        if flight.parked:
            self.parked += 1
            heappush(self.parked_line, flight)
        else:
            self.working_tokens += flight.context

    def remove(self, flight: Flight) -> None:
        """It has ended, or goes elsewhere."""
        self.touch()
        self.in_flight -= 1
        del self.flights[flight.id]
        if flight.parked:
            self.parked -= 1
        else:
            self.working_tokens -= flight.context

    def park(self, flight: Flight) -> None:
        """Take its permit; it stays placed here."""
        self.touch()
        flight.parked = True
        self.parked += 1
        self.working_tokens -= flight.context
        heappush(self.parked_line, flight)

    def unpark(self, flight: Flight) -> None:
        """It has a permit again."""
        self.touch()
        flight.parked = False
        self.parked -= 1
        self.working_tokens += flight.context

    def wait(self, flight: Flight) -> None:
        """Let it wait at the gate."""
        heappush(self.waiting, flight)

    def next_waiting(self) -> Flight | None:
        """The oldest rollout at the gate that may go on; it stays there."""
        waiting = self.waiting
        while waiting:
            flight = waiting[0]
            if self.waits_here(flight):
                return flight
            heappop(waiting)
        return None

    def oldest_parked(self) -> Flight | None:
        """The parked rollout to resume first; it stays parked."""
        line = self.parked_line
        while line:
            flight = line[0]
            here = self.flights.get(flight.id) is flight
            if here and flight.parked and not flight.held and flight.cancelled is None:
                return flight
            heappop(line)
        return None

    def waits_here(self, flight: Flight) -> bool:
        """Whether it stands at this gate and may go on."""
        # One that reached its deadline at the gate has ended meanwhile.
        here = self.flights.get(flight.id) is flight
        return here and flight.at_gate and not flight.parked and flight.cancelled is None


class _ById(dict[EngineId, EngineState]):
    def __missing__(self, engine: EngineId) -> EngineState:
        raise InvariantError(f"engine {engine!r} never joined; known: {sorted(self)}")


class Fleet:
    """All engines of a run."""

    __slots__ = (
        "_admission",
        "_all_usable",
        "_free",
        "_refused",
        "_roomy",
        "_stale",
        "by_id",
        "held",
        "homeless",
        "newest",
        "path",
        "placement",
        "several",
        "stopped",
    )

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.stopped = ""
        """Why nothing may start, and no call begin, on any engine (`RunHeld`); empty when they may."""
        self.by_id: dict[EngineId, EngineState] = _ById()
        """For whoever looks one up at every turn. Changed here alone."""
        self._all_usable = False
        """Whether no engine is out or not ready yet."""
        self._free = 0
        """Sum of the engines' room."""
        self._roomy: list[tuple[int, int, EngineState]] = []
        """Heap of (-room, number, engine), the most room first; entries with another room than the engine's are outdated."""
        self._stale: list[EngineState] = []
        """Engines whose room has to be looked at again. Only these are: at every event somebody asks for the sum."""
        self.placement = Placement()
        self.several = False
        """Whether there is more than one engine, and so a choice."""
        self.homeless: list[Flight] = []
        """Flights that want a turn while no engine is usable."""
        self.newest: Version = 0
        """Newest version published."""
        self.path = ""
        self._refused: tuple[Version, int] = (0, 0)
        """The version that last failed to load, and how often it did."""
        self.held: Version = 0
        """Version that every usable engine holds at least: what new work may count on."""

    def __getitem__(self, engine: EngineId) -> EngineState:
        return self.by_id[engine]

    def engines(self) -> list[EngineState]:
        return list(self.by_id.values())

    def cap(self) -> int:
        """Rollouts that all usable engines may hold together."""
        return sum(self._admission.cap(e.id) for e in self.by_id.values() if e.usable)

    def free(self) -> int:
        """Permits left over all usable engines."""
        if self.stopped:
            return 0
        if self._stale:
            self._look_again()
        return self._free

    def _look_again(self) -> None:
        """Bring the room of the engines up to date whose room may have changed."""
        for engine in self._stale:
            engine.is_stale = False
            room = 0
            if engine.ready and engine.out is None:
                room = max(0, self._admission.room(engine.id, engine.in_flight - engine.parked))
            if room == engine.room:
                continue
            self._free += room - engine.room
            engine.room = room
            if room:
                heappush(self._roomy, (-room, engine.number, engine))
        self._stale.clear()
        if len(self._roomy) > 8 * len(self.by_id) + 64:
            self._roomy = [(-e.room, e.number, e) for e in self.by_id.values() if e.room]
            heapify(self._roomy)

    def room(self, engine: EngineState) -> int:
        """Rollouts that may start on it now."""
        return self._admission.room(engine.id, engine.active)

    def place(self, preferred: EngineId | None) -> EngineState | None:
        """An engine with room: the preferred one, else the one with most room; None when all are full."""
        if preferred is not None:
            engine = self.by_id.get(preferred)
            if engine is not None and engine.usable and self._admission.room(preferred, engine.active) > 0:
                return engine
        if self._stale:
            self._look_again()
        roomy = self._roomy
        while roomy:
            room, _, engine = roomy[0]
            if engine.room == -room:
                return engine
            heappop(roomy)
        return None

    def first_to_go(self, groups: Iterable[OpenGroup], env: EnvName, now: float) -> OpenGroup | None:
        """The first of these groups of `env` that had not better wait for a permit on its own engine."""
        there = self.place(None) if self.several else None
        prefill_s = None
        if there is not None:
            prefill_s = self.placement.prefill_s(there.id, env, self._admission.prefill_s(there.id))
        if there is None or prefill_s is None:
            return next(iter(groups), None)  # there is no choice, or nothing to choose by
        engines, frees_within = self.by_id, self.placement.frees_within
        all_soon = self._all_usable and self.placement.all_free_within(len(engines), prefill_s, now)
        for group in groups:
            if group.engine is None:
                return group
            here = engines.get(group.engine)
            if here is None or here.room:
                return group
            if not all_soon and not (here.usable and frees_within(here.id, prefill_s, now)):
                return group
        return None

    def place_anyway(self) -> EngineState | None:
        """The usable engine that holds fewest rollouts, room or not; None when none is usable."""
        usable = [engine for engine in self.by_id.values() if engine.usable]
        return min(usable, key=lambda engine: engine.active, default=None)

    def joined(self, event: EngineJoined, catch_up: Version) -> EngineState:
        """An engine answers. It is ready unless the others already hold something newer, `catch_up`."""
        known = self.by_id.get(event.info.id)
        if known is not None and known.out is None:
            raise InvariantError(f"engine {event.info.id!r} joined twice")
        number = len(self.by_id) if known is None else known.number
        ready = event.version >= catch_up
        state = EngineState(event.info.id, event.version, ready, number, self._stale)
        if known is not None:
            # Rollouts placed on it before it was lost still count, until they have ended.
            state.in_flight, state.flights = known.in_flight, known.flights
            state.parked, state.parked_line = known.parked, known.parked_line
            state.calls, state.calling_tokens = known.calls, known.calling_tokens
            state.working_tokens = known.working_tokens
            state.calls_to_stop = known.calls_to_stop
            state.strays = known.strays
        state.kv_tokens = event.info.kv_tokens
        self.by_id[event.info.id] = state
        self.several = len(self.by_id) > 1
        self._admission.joined(event.info)
        self._recount()
        return state

    def taken_out(self, engine: EngineState, why: str) -> list[Flight]:
        """Use it no more; returns the flights that waited at its gate, for another engine."""
        engine.out = why
        if engine.loading is not None:
            engine.loading = None
            engine.strays += 1
        waiting = [f for f in dict.fromkeys(sorted(engine.waiting)) if engine.waits_here(f)]
        engine.waiting.clear()
        self._recount()
        return waiting

    @property
    def is_empty(self) -> bool:
        """Whether no engine is usable."""
        return not any(e.usable for e in self.by_id.values())

    def why_empty(self) -> str:
        """Each engine, and why it is not used."""
        return "; ".join(f"{e.id}: {e.out or 'not ready'}" for e in self.by_id.values()) or "none joined"

    def to_update(self) -> list[EngineState]:
        """Engines that should begin to load the newest version now."""
        return [
            e
            for e in self.by_id.values()
            if e.out is None
            and e.loading is None
            and e.held < self.newest
            and not e.calls_to_stop
            and not e.strays
        ]

    def gate_open(self, engine: EngineState) -> bool:
        """Whether a turn may call it now: not while it loads, nor while it is about to."""
        return not self.stopped and engine.loading is None and engine.held >= self.newest and engine.ready

    def loaded(self, event: WeightsLoaded) -> bool:
        """Whether the engine holds the version now; the one place where an engine's version flips."""
        engine = self[event.engine]
        if engine.strays:
            engine.strays -= 1
            return False
        if engine.loading != event.version:
            raise InvariantError(
                f"engine {engine.id!r} reports v{event.version} loaded, but was loading "
                f"{'nothing' if engine.loading is None else f'v{engine.loading}'}"
            )
        engine.loading = None
        if event.error is not None:
            engine.attempts += 1
            self._count_refusal(event)
            return False
        engine.attempts = 0
        engine.held = event.version
        engine.ready = True
        self._recount()
        return True

    def _count_refusal(self, event: WeightsLoaded) -> None:
        """EngineError when engines were got back, and none of them could load this version then either.

        Without it, files that cannot be loaded would have the engines taken out and got back for ever.
        """
        version, count = self._refused
        self._refused = version, count = event.version, (count if version == event.version else 0) + 1
        has_it = any(e.usable and e.held >= event.version for e in self.by_id.values())
        if count >= 2 * LOAD_ATTEMPTS * len(self.by_id) and not has_it:
            raise EngineError(
                f"v{event.version} did not load {count} times, on no engine, last: {event.error}; look at what the "
                "trainer publishes"
            )

    def _recount(self) -> None:
        self._all_usable = all(engine.usable for engine in self.by_id.values())
        self._free = 0
        self._roomy.clear()
        for engine in self.by_id.values():
            engine.room = 0
            engine.touch()
        self.held = min((e.held for e in self.by_id.values() if e.usable), default=self.held)
