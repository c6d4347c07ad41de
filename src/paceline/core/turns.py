"""Turns: the gate that every model call passes, and what becomes of rollouts when engines change under them.

TurnRequested ─▶ gate ─▶ GrantTurn            open unless the engine loads, is short of memory, or is gone
                  ▲
   parked ────────┤  ResumeRollout            the cap has room again
   homeless ──────┘                           an engine is back
"""

from __future__ import annotations

from heapq import heappop, heappush, nlargest

from paceline.core.accounting import Account
from paceline.core.admission import Admission
from paceline.core.fleet import FAILED_CALLS, LOAD_ATTEMPTS, SILENT_READINGS, EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.outbox import Outbox
from paceline.core.refusals import one_more
from paceline.core.scheduling.base import Scheduling
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.rollout import CancelCause
from paceline.errors import EngineError


class Turns:
    """Decides which model call goes where, and when."""

    __slots__ = (
        "_account",
        "_admission",
        "_engine_of",
        "_fleet",
        "_flight_of",
        "_flights",
        "_learner",
        "_no_engine_since",
        "_out",
        "_policy",
        "_setup",
    )

    def __init__(
        self,
        setup: CoreSetup,
        admission: Admission,
        scheduling: Scheduling,
        fleet: Fleet,
        flights: Flights,
        account: Account,
        out: Outbox,
    ) -> None:
        self._setup = setup
        self._policy = scheduling if scheduling.hears_turns else None
        self._admission = admission
        self._learner = admission if admission.learns else None
        self._fleet = fleet
        self._flights = flights
        self._flight_of = flights.by_id
        self._engine_of = fleet.by_id
        self._account = account
        self._out = out
        self._no_engine_since = 0.0

    # ── events ──

    def engine_lost(self, event: on.EngineLost) -> None:
        engine = self._fleet[event.engine]
        if engine.out is None:
            self.take_out(engine, event.error, revive=not event.leaves)
        elif event.leaves:
            engine.out = event.error

    def load_reported(self, event: on.LoadReported) -> None:
        engine = self._fleet[event.engine]
        admission = self._admission
        admission.observe(engine, event.load, self._out.now)
        engine.touch()
        self._listen(engine, event)
        if self._learner is None:
            return
        self._note_cap(engine)
        excess = admission.to_park(engine.id, engine.active)
        if excess > 0:
            self._shed(engine, excess, admission.reason(engine.id))
        self.resume_parked(engine)
        self.release_gate(engine)

    def _listen(self, engine: EngineState, event: on.LoadReported) -> None:
        """An engine that has spoken before and falls silent hangs, unless it is busy loading weights."""
        if event.load is not None:
            engine.speaks, engine.silent_readings = True, 0
        elif engine.speaks and engine.out is None and engine.loading is None:
            engine.silent_readings += 1
            if engine.silent_readings >= SILENT_READINGS:
                self.take_out(engine, f"it has not answered {engine.silent_readings} readings of its metrics")

    def turn_requested(self, event: on.TurnRequested) -> bool:
        """Whether something may start because of it: the scheduling policy took the rollout off its engine."""
        flight = self._flight_of[event.rollout]
        engine = self._engine_of[flight.engine]
        if not flight.parked:
            engine.working_tokens += event.context_tokens - flight.context
        flight.context = event.context_tokens
        flight.wants = event.max_tokens
        if flight.cancelled is None:
            flight.at_gate = True
            if not flight.turns:
                flight.first = flight.context
                if self._fleet.several:
                    self._fleet.placement.asked(flight.task.env, flight.context)
            if self._learner is not None:
                self._learner.turn_asked(engine, flight, self._out.now)
            flight.turns += not flight.continues
            if self._policy is not None and not flight.parked and flight.task.split == "train":
                self._policy.turn_asked(flight)
                if flight.held or flight.cancelled is not None:
                    # A permit that comes back is for who was let go on and found none: no other event may think of them.
                    self.resume_parked(self._engine_of[flight.engine])
                    return True
                engine = self._engine_of[flight.engine]  # the policy may have moved it
            if not flight.parked:
                self._ask_gate(flight, engine)
            elif engine.out is not None and not self._fleet.is_empty:
                self.resume_parked(self._move(flight))
        return False

    def segment_ended(self, event: on.SegmentEnded) -> bool:
        """Whether something may start because of it: nothing, since the rollout keeps its permit."""
        flight = self._flight_of[event.rollout]
        engine = self._engine_of[event.engine]
        flight.calling = False
        engine.calls -= 1
        engine.calling_tokens -= flight.context
        tokens = 0
        if event.versions:
            engine.refusals = None
            oldest = event.versions[0][0]
            for version, count in event.versions:
                tokens += count
                if version < oldest:
                    oldest = version
            # The first tokens date the rollout: until then the version at the request stood in for theirs.
            if not flight.sampled or flight.oldest is None or oldest < flight.oldest:
                self._flights.sampled_since(flight, oldest)
            if self._fleet.several and not flight.sampled:
                self._fleet.placement.answered(
                    engine.id, flight.context, event.cached_tokens, event.seconds, self._out.now
                )
            flight.sampled += tokens
            flight.requests += tokens > 0
            flight.context += tokens
            flight.known = flight.context
            if not flight.parked:
                engine.working_tokens += tokens
            self._account.sampled(flight.account, tokens)
        # Cut by a budget of the request, not by the limit that was asked for: the rest of the turn is still to come.
        cut = event.finish == "length" and tokens < flight.wants
        flight.continues = cut or (event.finish == "abort" and event.error is None and not event.given_up)
        flight.waits_since = self._out.now
        flight.refused = event.is_busy
        if self._learner is not None:
            engine.touch()
            self._learner.segment_ended(
                engine,
                flight,
                tokens,
                event.cached_tokens,
                event.seconds,
                event.error,
                self._out.now,
                is_busy=event.is_busy,
            )
        if event.error is None:
            if not event.given_up:
                engine.failed_calls = 0
        elif event.is_outage and flight.cancelled is None:
            self._count_failure(engine, event.error)
        if event.is_busy:
            self._count_refusal(engine, event)
        if flight.cancelled is not None:
            engine.calls_to_stop -= 1
            if not engine.calls_to_stop:
                self.update_engines("the calls of cancelled rollouts have stopped")
        if engine.waiting:
            self.release_gate(engine)
        return False

    def loaded(self, event: on.WeightsLoaded) -> None:
        engine = self._fleet[event.engine]
        if self._fleet.loaded(event):
            self.update_engines("a newer version was published meanwhile")
            self.release_gate(engine)
            self.house_the_homeless()
        elif engine.out is None:
            if event.is_outage and event.error is not None:
                self.take_out(engine, event.error)
            elif engine.attempts >= LOAD_ATTEMPTS:
                self.take_out(
                    engine, f"v{event.version} did not load {engine.attempts} times, last: {event.error}"
                )
            else:
                failed = (
                    f"attempt {engine.attempts} failed: {event.error}" if engine.attempts else "it is back"
                )
                self.update_engines(failed)

    def ended(self, flight: Flight) -> None:
        """A rollout has ended: its place on its engine is free."""
        engine = self._fleet[flight.engine]
        engine.remove(flight)
        if self._fleet.several:
            self._fleet.placement.freed(engine.id, self._out.now)
        if self._learner is not None:
            self._learner.ended(engine, flight, self._out.now)
        if engine.parked:
            self.resume_parked(engine)
        if engine.waiting:
            # It may have stood first in line, too big to be let through, and have reached its deadline there.
            self.release_gate(engine)

    # ── the gate ──

    def _ask_gate(self, flight: Flight, engine: EngineState) -> None:
        if engine.out is not None:
            if self._fleet.is_empty:
                self._fleet.homeless.append(flight)
                return
            engine = self._move(flight)
        if self._fleet.gate_open(engine) and not engine.waiting and self._fits(flight, engine):
            self._grant(flight, engine)
        else:
            engine.wait(flight)
            self.release_gate(engine)

    def _fits(self, flight: Flight, engine: EngineState) -> bool:
        """Whether the engine's memory has room for this call; one may always run."""
        if self._learner is None or not engine.calls:
            return True
        limit = self._learner.turn_tokens(engine.id)
        return limit is None or engine.calling_tokens + flight.context <= limit

    def _grant(self, flight: Flight, engine: EngineState) -> None:
        flight.calling = True
        flight.at_gate = False
        flight.granted_at = self._out.now
        engine.calls += 1
        engine.calling_tokens += flight.context
        if not flight.sampled:
            self._flights.sampled_since(flight, engine.held)
        if self._learner is not None:
            self._learner.turn_granted(engine, flight, self._out.now)
        if self._policy is None or flight.task.split == "eval":
            limit = self._setup.segment_tokens
        else:
            limit = self._policy.budget(flight)
        self._out.say(do.GrantTurn(flight.id, engine.id, engine.held, limit))

    def release_gate(self, engine: EngineState) -> None:
        """Let through what may go on, oldest rollout first: a younger one does not slip past one that does not fit."""
        if not engine.waiting or not self._fleet.gate_open(engine):
            return
        while (flight := engine.next_waiting()) is not None and self._fits(flight, engine):
            heappop(engine.waiting)
            self._grant(flight, engine)

    def _still_waits(self, flight: Flight) -> bool:
        # One that reached its deadline at the gate has ended meanwhile; one that was parked waits to be resumed.
        return flight.cancelled is None and not flight.parked and flight.id in self._flights

    def _move(self, flight: Flight) -> EngineState:
        """Place a flight whose engine is out on another one, over its cap if need be: it holds a permit already."""
        engine = self._fleet.place(None) or min(
            (e for e in self._fleet.engines() if e.usable), key=lambda e: e.in_flight
        )
        self.move(flight, engine)
        return engine

    # ── parking and cancelling ──

    def _note_cap(self, engine: EngineState) -> None:
        """Tell the journal when a cap has changed by more than a twentieth, or for another kind of reason."""
        cap, reason = self._admission.cap(engine.id), self._admission.reason(engine.id)
        before, why = engine.noted
        if abs(cap - before) * 20 > before or (cap == before and reason[:24] != why[:24]):
            engine.noted = (cap, reason)
            self._out.say(do.NoteCap(engine.id, cap, reason))

    def _shed(self, engine: EngineState, count: int, why: str) -> None:
        """Take the youngest rollouts off an engine: parked with what they have, or cancelled where that is off."""
        parks = self._setup.park
        running = [
            f
            for f in engine.flights.values()
            if f.cancelled is None and not f.parked and (parks or f.task.split == "train")
        ]
        for flight in nlargest(count, running):
            if parks:
                self._park(flight, engine, why)
            else:
                self.cancel(flight, "overload", why)

    def _park(self, flight: Flight, engine: EngineState, why: str) -> None:
        engine.park(flight)
        self._out.say(do.ParkRollout(flight.id, why))

    def resume_parked(self, engine: EngineState) -> None:
        """Let parked rollouts go on while the cap has room; they come before new ones."""
        while engine.parked and engine.out is None and self._admission.room(engine.id, engine.active) > 0:
            flight = engine.oldest_parked()
            if flight is None:
                return
            heappop(engine.parked_line)
            self._resume(flight, engine)

    def _resume(self, flight: Flight, engine: EngineState) -> None:
        engine.unpark(flight)
        if self._learner is not None:
            self._learner.started(engine, flight, self._out.now)
        self._out.say(do.ResumeRollout(flight.id, f"{engine.active} of {self._admission.cap(engine.id)} run"))
        if flight.at_gate:
            self._ask_gate(flight, self._engine_of[flight.engine])

    # ── what the scheduling policy holds ──

    def hold(self, flight: Flight, why: str) -> None:
        """Park a rollout until it is released, whatever the cap."""
        self._flights.hold(flight, True)
        if not flight.parked:
            self._park(flight, self._fleet[flight.engine], why)

    def release(self, flight: Flight, engine: EngineState | None = None) -> None:
        """Let it go on there, or where it was: now if the cap has room, else like any that is parked."""
        self._flights.hold(flight, False)
        if engine is not None and engine.id != flight.engine:
            self.move(flight, engine)
        there = self._fleet[flight.engine]
        if there.out is not None and not self._fleet.is_empty:
            if flight.calling:
                return  # it is moved when its call has come back, and it asks for the next
            there = self._move(flight)
        heappush(there.parked_line, flight)
        self.resume_parked(there)

    def move(self, flight: Flight, engine: EngineState) -> None:
        """Place a rollout that makes no call on another engine."""
        self._fleet[flight.engine].remove(flight)
        engine.add(flight)

    def _rehouse_parked(self) -> None:
        """Parked rollouts of engines that are not used any more wait at others."""
        if self._fleet.is_empty:
            return
        for lost in self._fleet.engines():
            if lost.out is None or not lost.parked:
                continue
            # One whose call has not come back yet is moved when it asks for the next.
            for flight in [f for f in lost.flights.values() if f.parked and not f.calling]:
                self.resume_parked(self._move(flight))

    def cancel(self, flight: Flight, cause: CancelCause, reason: str) -> None:
        if flight.cancelled is not None:
            return
        flight.cancelled = cause
        if flight.calling:
            self._fleet[flight.engine].calls_to_stop += 1
        self._out.say(do.CancelRollout(flight.id, cause, reason))

    # ── engines ──

    def update_engines(self, why: str) -> None:
        fleet = self._fleet
        for engine in fleet.to_update():
            engine.loading = fleet.newest
            self._out.say(do.UpdateWeights(engine.id, fleet.newest, fleet.path, why))

    def take_out(self, engine: EngineState, why: str, *, revive: bool = True) -> None:
        """Use an engine no more, until it joins again; what waited for it goes elsewhere."""
        if revive:
            self._out.say(do.ReviveEngine(engine.id, why))
        for flight in self._fleet.taken_out(engine, why):
            if self._still_waits(flight):
                self._ask_gate(flight, self._engine_of[flight.engine])
        self._rehouse_parked()
        if self._fleet.is_empty:
            self._no_engine_since = self._out.now
            wait_s = self._setup.engine_wait_s
            self._out.wake_at(
                self._out.now + wait_s, f"no engine is usable; the run waits {wait_s:g} s for one"
            )

    def house_the_homeless(self) -> None:
        if self._fleet.homeless and not self._fleet.is_empty:
            homeless, self._fleet.homeless = self._fleet.homeless, []
            for flight in homeless:
                if self._still_waits(flight):
                    self._ask_gate(flight, self._engine_of[flight.engine])
        self._rehouse_parked()

    def check_for_engines(self) -> None:
        if self._fleet.is_empty and self._out.now >= self._no_engine_since + self._setup.engine_wait_s - 1e-6:
            raise EngineError(
                f"no engine has been usable for {self._setup.engine_wait_s:g} s (engine.lost_s): "
                f"{self._fleet.why_empty()}; mend them and resume the run"
            )

    def _count_refusal(self, engine: EngineState, event: on.SegmentEnded) -> None:
        """An engine that is busy stays in use. EngineError when none of them has taken a call for as long as a run may be
        without any: looked at here, since nothing else happens then."""
        now, wait_s = self._out.now, self._setup.engine_wait_s
        engine.refusals = one_more(engine.refusals, event.seconds, event.error or "", now)
        left = [e for e in self._fleet.engines() if e.out is None]
        if left and all(e.takes_none(wait_s, now) for e in left):
            told = "; ".join(
                f"{e.id} has said for {now - e.refusals.since:.0f} s that it is busy (429), and refused "
                f"{e.refusals.calls} calls, the last: {e.refusals.said}"
                for e in left
                if e.refusals is not None
            )
            raise EngineError(
                f"no engine takes a call any more, which a run puts up with for {wait_s:g} s (engine.lost_s): {told}; find out "
                "what else it serves, or what limits it, and resume the run"
            )

    def _count_failure(self, engine: EngineState, error: str) -> None:
        """Calls fail now and then; several in a row are the engine's fault."""
        engine.failed_calls += 1
        if engine.failed_calls >= FAILED_CALLS and engine.out is None:
            self.take_out(engine, f"{engine.failed_calls} calls in a row failed, the last: {error}")
