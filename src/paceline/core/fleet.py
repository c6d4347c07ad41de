"""Which engines there are, which version each holds, and who waits at its gate.

An engine's version flips in one place, `loaded`, when the engine said so. While it loads, turns that want it wait at
its gate; they are let through, oldest rollout first, when it is done.
"""

from __future__ import annotations

from paceline.core.admission import Admission
from paceline.core.flights import Flight
from paceline.domain.events import EngineJoined, WeightsLoaded
from paceline.domain.ids import EngineId, Version
from paceline.errors import EngineError, InvariantError

LOAD_ATTEMPTS = 3
"""Times an engine may fail to load a version before it is taken out."""


class EngineState:
    """One engine."""

    __slots__ = (
        "attempts",
        "calls_to_stop",
        "held",
        "id",
        "in_flight",
        "loading",
        "out",
        "ready",
        "strays",
        "waiting",
    )

    def __init__(self, engine: EngineId, held: Version, ready: bool) -> None:
        self.id = engine
        self.held = held
        self.ready = ready
        """False for one that joined with older weights, until it has loaded the current ones."""
        self.out: str | None = None
        """Why it is not used any more."""
        self.loading: Version | None = None
        self.attempts = 0
        self.in_flight = 0
        """Rollouts placed on it."""
        self.calls_to_stop = 0
        """Calls of cancelled rollouts that have not stopped: they must, before its weights may change."""
        self.strays = 0
        """Updates under way when it was lost: their answers are still to come, and say nothing."""
        self.waiting: list[Flight] = []

    @property
    def usable(self) -> bool:
        return self.ready and self.out is None


class Fleet:
    """All engines of a run."""

    __slots__ = ("_admission", "_engines", "held", "newest", "path")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._engines: dict[EngineId, EngineState] = {}
        self.newest: Version = 0
        """Newest version published."""
        self.path = ""
        self.held: Version = 0
        """Version that every usable engine holds at least: what new work may count on."""

    def __getitem__(self, engine: EngineId) -> EngineState:
        try:
            return self._engines[engine]
        except KeyError:
            raise InvariantError(f"engine {engine!r} never joined; known: {sorted(self._engines)}") from None

    def engines(self) -> list[EngineState]:
        return list(self._engines.values())

    def cap(self) -> int:
        """Rollouts that all usable engines may hold together."""
        return sum(self._admission.cap(e.id) for e in self._engines.values() if e.usable)

    def free(self) -> int:
        """Permits left over all usable engines."""
        free = 0
        for engine in self._engines.values():
            if engine.usable:
                free += max(0, self._admission.cap(engine.id) - engine.in_flight)
        return free

    def place(self, preferred: EngineId | None) -> EngineState | None:
        """An engine with room: the preferred one, else the one with most room; None when all are full."""
        if preferred is not None:
            engine = self._engines.get(preferred)
            if engine is not None and engine.usable and engine.in_flight < self._admission.cap(preferred):
                return engine
        best, best_room = None, 0
        for engine in self._engines.values():
            if engine.usable:
                room = self._admission.cap(engine.id) - engine.in_flight
                if room > best_room:
                    best, best_room = engine, room
        return best

    def joined(self, event: EngineJoined, catch_up: Version) -> EngineState:
        """An engine answers. It is ready unless the others already hold something newer, `catch_up`."""
        known = self._engines.get(event.info.id)
        if known is not None and known.out is None:
            raise InvariantError(f"engine {event.info.id!r} joined twice")
        state = EngineState(event.info.id, event.version, ready=event.version >= catch_up)
        if known is not None:
            # Rollouts placed on it before it was lost still count, until they have ended.
            state.in_flight = known.in_flight
            state.calls_to_stop = known.calls_to_stop
            state.strays = known.strays
        self._engines[event.info.id] = state
        self._admission.joined(event.info)
        self._recount()
        return state

    def taken_out(self, engine: EngineState, why: str) -> list[Flight]:
        """Use it no more; the flights that waited at its gate, for another engine. EngineError if it was the last."""
        engine.out = why
        if engine.loading is not None:
            engine.loading = None
            engine.strays += 1
        waiting, engine.waiting = engine.waiting, []
        self._recount()
        if not any(e.usable for e in self._engines.values()):
            reasons = "; ".join(f"{e.id}: {e.out or 'not ready'}" for e in self._engines.values())
            raise EngineError(
                f"no engine is left to sample from ({reasons}): restart them and resume the run"
            )
        return waiting

    def to_update(self) -> list[EngineState]:
        """Engines that should begin to load the newest version now."""
        return [
            e
            for e in self._engines.values()
            if e.out is None
            and e.loading is None
            and e.held < self.newest
            and not e.calls_to_stop
            and not e.strays
        ]

    def gate_open(self, engine: EngineState) -> bool:
        """Whether a turn may call it now: not while it loads, nor while it is about to."""
        return engine.loading is None and engine.held >= self.newest and engine.ready

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
            return False
        engine.attempts = 0
        engine.held = event.version
        engine.ready = True
        self._recount()
        return True

    def _recount(self) -> None:
        self.held = min((e.held for e in self._engines.values() if e.usable), default=self.held)
