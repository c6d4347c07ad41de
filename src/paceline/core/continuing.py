"""Rollouts that an earlier life of the run left under way: when they go on, and on which engine.

They are in flight from the first moment, so that their groups wait for them and sweeps see them, but hold no permit until
they go on. They come before anything new. See `docs/continuing.md`.
"""

from __future__ import annotations

from collections import OrderedDict

from paceline.core.admission import Admission
from paceline.core.fleet import EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger
from paceline.core.launching import Launcher
from paceline.core.outbox import Outbox
from paceline.core.scheduling.base import Scheduling
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.ids import EnvName, RolloutId, Version
from paceline.errors import InvariantError

_GOES_ON = "it was under way when the run ended"


class _Line:
    """Rollouts in the order in which they go on, by environment: one that may start nothing now costs nothing a rollout."""

    __slots__ = ("_by_env", "_ranks")

    def __init__(self) -> None:
        self._by_env: dict[EnvName, OrderedDict[RolloutId, Flight]] = {}
        self._ranks: dict[RolloutId, int] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, rollout: RolloutId) -> bool:
        return rollout in self._ranks

    def add(self, flight: Flight) -> None:
        self._ranks[flight.id] = len(self._ranks)
        self._by_env.setdefault(flight.task.env, OrderedDict())[flight.id] = flight

    def remove(self, flight: Flight) -> None:
        del self._ranks[flight.id], self._by_env[flight.task.env][flight.id]

    def firsts(self) -> list[Flight]:
        """The first of each environment, in order."""
        firsts = [next(iter(flights.values())) for flights in self._by_env.values() if flights]
        return sorted(firsts, key=lambda flight: self._ranks[flight.id])


class Continuing:
    """Those that wait to go on."""

    def __init__(
        self,
        admission: Admission,
        scheduling: Scheduling,
        fleet: Fleet,
        flights: Flights,
        groups: GroupLedger,
        launcher: Launcher,
        out: Outbox,
    ) -> None:
        self._learner = admission if admission.learns else None
        self._policy = scheduling
        self._fleet = fleet
        self._flights = flights
        self._groups = groups
        self._launcher = launcher
        self._out = out
        self._left: dict[RolloutId, Version | None] = {}
        """What an earlier life left under way, until it is known what becomes of it: its oldest version."""
        self._waiting = _Line()
        """Those with tokens, the oldest first."""
        self._empty = _Line()
        """Those without any, which cannot grow stale."""

    def left(self, flight: Flight, oldest: Version | None) -> None:
        """An earlier life left this under way. It goes on (`opened`), or ends by an event."""
        self._flights.add(flight)
        self._left[flight.id] = oldest

    def opened(self, rollouts: tuple[RolloutId, ...]) -> None:
        """These go on; first whose tokens are oldest, and have least time left to train; last those without any."""
        for rollout in sorted(rollouts, key=lambda rollout: self._left.get(rollout) or 0):
            if rollout not in self._left or not self._groups.has(rollout):
                raise InvariantError(
                    f"{rollout} is to go on, but nothing of it was under way, or its group is not open"
                )
            flight, oldest = self._flights[rollout], self._left[rollout]
            (self._empty if oldest is None else self._waiting).add(flight)
            flight.waits_since = self._out.now
            flight.stood.begin(self._out.now)
            self._flights.goes_on_from(flight, flight.sampled, oldest)
        self._left.clear()

    def fill(self) -> None:
        """Let go on what there are permits for."""
        if not (self._waiting or self._empty):
            return
        held: set[EnvName] = set()
        while self._policy.may_start() and self._fleet.free() > 0:
            flight = self._next(held)
            engine = None if flight is None else self._fleet.place(self._groups.of(flight.id).engine)
            if flight is None or engine is None:
                return
            self._go_on(flight, engine)
            self._launcher.went_on(flight)

    def _next(self, held: set[EnvName]) -> Flight | None:
        """The first whose environment may start one now; `held` are those that are known not to."""
        for line in (self._waiting, self._empty):
            for flight in line.firsts():
                if flight.oldest is not None and flight.oldest > self._fleet.held:
                    break  # its trainer went back, and makes these weights again: older ones would only make it staler
                env = flight.task.env
                if env in held:
                    continue
                if self._launcher.may_go_on(env):
                    return flight
                held.add(env)
        return None

    def before_cancelling(self, flight: Flight) -> None:
        """What is asked to stop must have begun: it ends by its `RolloutEnded` like any other."""
        if (flight.id in self._waiting or flight.id in self._empty) and flight.cancelled is None:
            self._go_on(flight, None)

    def continued(self, event: on.RolloutContinued) -> None:
        """One has come to the end of its record."""
        flight = self._flights[event.rollout]
        if event.tokens + event.lost != flight.sampled:
            raise InvariantError(
                f"{event.rollout} goes on from {event.tokens} tokens and has lost {event.lost}, but had {flight.sampled}"
            )
        flight.account.move("in_flight", "failed", event.lost, rollouts=0)
        self._flights.goes_on_from(flight, event.tokens, event.oldest)
        flight.turns, flight.continues = event.turns, event.is_mid_turn

    def _go_on(self, flight: Flight, engine: EngineState | None) -> None:
        (self._waiting if flight.id in self._waiting else self._empty).remove(flight)
        flight.stood.end(self._out.now)
        group = self._groups.of(flight.id)
        if engine is not None:
            engine.add(flight)
            flight.waits_since = self._out.now
            if group.engine is None:
                group.engine = engine.id
            if self._learner is not None:
                self._learner.started(engine, flight, self._out.now)
        self._out.say(
            do.ContinueRollout(
                flight.id,
                flight.task,
                group.seed,
                self._launcher.noise_of(flight.id, group),
                "" if engine is None else engine.id,
                0 if engine is None else engine.held,
                flight.started,
                flight.sampled,
                flight.requests,
                _GOES_ON,
                flight.stood.seconds,
            )
        )
