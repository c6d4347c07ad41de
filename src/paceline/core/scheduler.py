"""The core: composes the parts, decides nothing alone.

`Core.handle(event, now)` takes one event and returns the commands it causes. The cost of an event does not depend on
how many rollouts are in flight, except where it must act on many of them (a sweep of stale ones, a shutdown).

    events ──▶ Core.handle ──▶ commands
                 │  launch      curriculum, pacing, rates → groups → fleet (which engine) → flights (a permit)
                 │  turns       fleet's gate
                 │  endings     flights → groups → ProcessGroup | eval ledger
                 │  training    GroupProcessed → batch list → ShipBatch → sweep
                 │  weights     fleet: PolicyPublished → UpdateWeights → WeightsLoaded
                 └─ the end     drain → last weights → last evals → checkpoint → FinishRun
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, nlargest
from typing import Any

from paceline.core.accounting import Account
from paceline.core.admission import Admission
from paceline.core.batching import BatchList, DeadStreak
from paceline.core.curriculum import Curriculum
from paceline.core.evaluation import EvalEpoch, EvalPlan
from paceline.core.fleet import FAILED_CALLS, LOAD_ATTEMPTS, EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.pacing import Pacing
from paceline.core.rates import StartRate
from paceline.core.setup import CoreSetup
from paceline.core.staleness import oldest_allowed
from paceline.core.streams import key, mix
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.rollout import CancelCause, Rollout
from paceline.domain.task import TaskRef
from paceline.errors import EngineError, InvariantError, TrainerError

_RETRIED = frozenset({"infrastructure", "engine"})
_MEMBERS = 1 << 16
"""More members than a group can have: keeps the noise counters of two groups apart."""


class Core:
    """All decisions of one run."""

    def __init__(self, setup: CoreSetup, admission: Admission) -> None:
        self.setup = setup
        self.account = Account()
        self.fleet = Fleet(admission)
        self.flights = Flights()
        self.groups = GroupLedger()
        self.curriculum = Curriculum([spec.source for spec in setup.train], setup.seed)
        self.pacing = Pacing(
            setup.lag, setup.target_rollouts, setup.target_tokens, tokens_guess=max(1, setup.seq_len // 2)
        )
        self.list = BatchList(rollouts=setup.target_rollouts, tokens=setup.target_tokens)
        self.dead = DeadStreak(setup.dead_group_limit)
        self.plan = EvalPlan(setup.evals, last=setup.max_steps)
        self.cut = 0
        """Batches cut so far: the step being collected is the next one."""
        self.warnings: list[str] = []
        """Set by `restore`: what of the checkpoint did not fit."""
        self._admission = admission
        self._learner = admission if admission.learns else None
        self._specs = {spec.name: spec for spec in setup.train}
        self._eval_sections = {section.label: section for section in setup.evals}
        self._is_finite = all(s.source.size is not None and s.source.epochs is not None for s in setup.train)
        """Whether the tasks can run out."""
        self._on_stale = {spec.name: spec.on_stale for spec in setup.train}
        self._rates = {s.name: StartRate(s.tasks_per_minute) for s in setup.train if s.tasks_per_minute}
        self._launchable: dict[EnvName, deque[OpenGroup]] = {spec.name: deque() for spec in setup.train}
        self._owing = 0
        """Train groups in `_launchable`."""
        self._eval_queue: deque[OpenGroup] = deque()
        self._epochs: dict[GroupId, EvalEpoch] = {}
        """Open eval groups, and the measurement each belongs to."""
        self._processing: dict[GroupId, OpenGroup] = {}
        """Train groups that have closed and are being processed."""
        self._cut_short: list[TaskRef] = []
        """Tasks whose group the end of the run stopped before it could bring anything."""
        self._next_group = 0
        self._group_key = key(setup.seed, "group")
        self._noise_key = key(setup.seed, "noise")
        self._unacknowledged = 0
        """Batches handed to the shell and not reported shipped."""
        self._trained = 0
        self._draining: str | None = None
        """Why no more training rollouts are started."""
        self._stopping: str | None = None
        """Why the run ends early: evals stop too."""
        self._save_due = False
        self._saving = False
        self._closing = False
        """Whether the last checkpoint has been asked for."""
        self._finished = False
        self._alarms: list[float] = []
        """Heap of the times that a `WakeAt` asked for and that have not fired."""
        self._no_engine_since = 0.0
        self._now = 0.0
        self._out: list[Command] = []
        self._handlers: dict[type, Callable[[Any], bool]] = {
            on.RunOpened: self._run_opened,
            on.EngineJoined: self._engine_joined,
            on.EngineLost: self._engine_lost,
            on.LoadReported: self._load_reported,
            on.PolicyPublished: self._policy_published,
            on.WeightsLoaded: self._weights_loaded,
            on.TurnRequested: self._turn_requested,
            on.SegmentEnded: self._segment_ended,
            on.RolloutEnded: self._rollout_ended,
            on.GroupProcessed: self._group_processed,
            on.BatchShipped: self._batch_shipped,
            on.StepTrained: self._step_trained,
            on.CheckpointSaved: self._checkpoint_saved,
            on.TimerFired: self._timer_fired,
            on.ShutdownRequested: self._shutdown_requested,
        }

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def trained(self) -> int:
        """Newest step the trainer acknowledged."""
        return self._trained

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide. `now` in seconds on the run's clock, never going back.

        Raises NoProgressError when too many groups in a row brought nothing to train, EngineError when no engine is
        left, InvariantError when an event contradicts what the core knows. Each ends the run.
        """
        if self._finished:
            return []  # a version or a reading that came late: there is nothing left to decide
        self._now = now
        out = self._out = []
        if self._handlers[type(event)](event):
            self._advance(may_cut=type(event) is not on.RolloutEnded)
        return out

    # ── what each event changes; returns whether anything may start or finish because of it ──

    def _run_opened(self, event: on.RunOpened) -> bool:
        return True

    def _engine_joined(self, event: on.EngineJoined) -> bool:
        engine = self.fleet.joined(event, catch_up=self.fleet.held)
        if engine.ready and event.version > self.fleet.newest:
            self.fleet.newest = event.version
        self._update_engines("the engine joined with older weights")
        self._open_due_evals()
        self._house_the_homeless()
        if self._draining is None and self.cut >= self.setup.max_steps:
            # Resumed when only the last weights, evals or the end itself were missing.
            self._drain(f"step {self.cut} of {self.setup.max_steps} was cut before", "surplus")
        return True

    def _engine_lost(self, event: on.EngineLost) -> bool:
        engine = self.fleet[event.engine]
        if engine.out is None:
            self._take_out(engine, event.error)
        return True

    def _load_reported(self, event: on.LoadReported) -> bool:
        engine = self.fleet[event.engine]
        admission = self._admission
        admission.observe(engine, event.load, self._now)
        if self._learner is None:
            return True
        self._note_cap(engine)
        excess = admission.to_park(engine.id, engine.active)
        if excess > 0:
            self._shed(engine, excess, admission.reason(engine.id))
        self._resume_parked(engine)
        self._release_gate(engine)
        return True

    def _policy_published(self, event: on.PolicyPublished) -> bool:
        fleet = self.fleet
        if event.version <= fleet.newest:
            raise TrainerError(
                f"the trainer published v{event.version} after v{fleet.newest}, but versions only rise: it went on "
                "from an older checkpoint than this run; resume both from the same step"
            )
        if event.version > self.cut:
            raise TrainerError(
                f"the trainer published v{event.version}, but only {self.cut} batches were shipped and step n makes "
                "vn: it reads another run's batches, or counts differently"
            )
        fleet.newest, fleet.path = event.version, event.path
        for engine in fleet.engines():
            engine.attempts = 0
        self._update_engines(f"v{event.version} was published")
        return False

    def _weights_loaded(self, event: on.WeightsLoaded) -> bool:
        engine = self.fleet[event.engine]
        if self.fleet.loaded(event):
            self._update_engines("a newer version was published meanwhile")
            self._release_gate(engine)
            self._open_due_evals()
            self._house_the_homeless()
        elif engine.out is None:
            if engine.attempts >= LOAD_ATTEMPTS:
                self._take_out(
                    engine, f"v{event.version} did not load {engine.attempts} times, last: {event.error}"
                )
            else:
                failed = (
                    f"attempt {engine.attempts} failed: {event.error}" if engine.attempts else "it is back"
                )
                self._update_engines(failed)
        return True

    def _turn_requested(self, event: on.TurnRequested) -> bool:
        flight = self.flights[event.rollout]
        engine = self.fleet[flight.engine]
        if not flight.parked:
            engine.working_tokens += event.context_tokens - flight.context
        flight.context = event.context_tokens
        flight.wants = event.max_tokens
        if flight.cancelled is None:
            flight.at_gate = True
            if self._learner is not None:
                self._learner.turn_asked(engine, flight, self._now)
            flight.turns += not flight.continues
            if not flight.parked:
                self._ask_gate(flight)
            elif engine.out is not None and not self.fleet.is_empty:
                self._resume_parked(self._move(flight))
        return False

    def _segment_ended(self, event: on.SegmentEnded) -> bool:
        flight = self.flights[event.rollout]
        engine = self.fleet[event.engine]
        flight.calling = False
        engine.calls -= 1
        engine.calling_tokens -= flight.context
        tokens = 0
        if event.versions:
            oldest = event.versions[0][0]
            for version, count in event.versions:
                tokens += count
                if version < oldest:
                    oldest = version
            # The first tokens date the rollout: until then the version at the request stood in for theirs.
            if not flight.sampled or flight.oldest is None or oldest < flight.oldest:
                self.flights.sampled_since(flight, oldest)
            flight.sampled += tokens
            flight.context += tokens
            if not flight.parked:
                engine.working_tokens += tokens
            self.account.sampled(flight.account, tokens)
        # Cut by a budget of the request, not by the limit that was asked for: the rest of the turn is still to come.
        cut = event.finish == "length" and tokens < flight.wants
        flight.continues = cut or (event.finish == "abort" and event.error is None)
        flight.waits_since = self._now
        if self._learner is not None:
            self._learner.segment_ended(
                engine, flight, tokens, event.cached_tokens, event.seconds, event.error, self._now
            )
        if event.error is None:
            engine.failed_calls = 0
        elif flight.cancelled is None:
            self._count_failure(engine, event.error)
        if flight.cancelled is not None:
            engine.calls_to_stop -= 1
            if not engine.calls_to_stop:
                self._update_engines("the calls of cancelled rollouts have stopped")
        if engine.waiting:
            self._release_gate(engine)
        return False

    def _rollout_ended(self, event: on.RolloutEnded) -> bool:
        rollout = event.rollout
        flight = self.flights.remove(rollout.id)
        if flight.calling:
            raise InvariantError(f"{rollout.id} ended while its call to {flight.engine!r} was still running")
        engine = self.fleet[flight.engine]
        engine.remove(flight)
        if self._learner is not None:
            self._learner.ended(engine, flight, self._now)
        if engine.parked:
            self._resume_parked(engine)
        group = self.groups[rollout.id.group]
        if rollout.task.split == "eval":
            flight.account.move("in_flight", "eval", flight.sampled)
            self._settle_eval(self.groups.settle(rollout))
            return True
        if self._may_retry(rollout):
            flight.account.move("in_flight", "failed", flight.sampled)
            if not group.owes_launches:
                self._launchable[group.task.env].appendleft(group)
                self._owing += 1
            group.retries.append(rollout)
            return True
        flight.account.move("in_flight", "grouped", flight.sampled)
        group.tokens[rollout.id] = flight.sampled
        self._process(group, self.groups.settle(rollout))
        return True

    def _group_processed(self, event: on.GroupProcessed) -> bool:
        result = event.result
        group = self._processing.pop(result.group, None)
        if group is None:
            raise InvariantError(f"group {result.group} was processed, but was not waiting to be")
        tokens, env = group.tokens, group.task.env
        account = self.account.of("train", env)
        listed = 0
        for verdict in result.verdicts:
            sampled = tokens.pop(verdict.rollout)
            if verdict.fate != "queued":
                account.move("grouped", verdict.fate, sampled)
                continue
            listed += 1
            account.move("grouped", "queued", sampled)
            # What will not ship of a rollout that does: cut-off tails.
            ships = sum(sample.trainable_tokens for sample in verdict.samples)
            account.move("queued", "overlong", sampled - ships, rollouts=0)
            self.list.add(verdict, env)
        if tokens:
            raise InvariantError(f"group {result.group}: no verdict on {sorted(map(str, tokens))}")
        self.pacing.taken -= group.places - listed
        self._forget(result.group)
        if self._draining is None:
            self.dead.add(result, event.error)
        elif not listed and (group.closed_unlaunched or any(v.fate == "cancelled" for v in result.verdicts)):
            # The end cut it short: it says nothing about the task, which a resumed run draws again.
            self._cut_short.append(group.task)
        return True

    def _batch_shipped(self, event: on.BatchShipped) -> bool:
        self._unacknowledged -= 1
        if event.step % self.setup.checkpoint_every == 0 and event.step < self.setup.max_steps:
            self._save_due = True
        # Not with a batch between here and the trainer: a run resumed from that state would not ship it again.
        if self._save_due and not self._unacknowledged and not self._saving and self._draining is None:
            self._save_due = False
            self._save(f"every {self.setup.checkpoint_every} steps")
        return True

    def _step_trained(self, event: on.StepTrained) -> bool:
        # Not compared with what was reported shipped: a fast trainer's word may overtake that report.
        if event.step > self.cut:
            raise TrainerError(
                f"the trainer acknowledged step {event.step}, but batches only up to {self.cut} were cut: it reads "
                "another run's batches"
            )
        self._trained = max(self._trained, event.step)
        return self._draining is not None

    def _checkpoint_saved(self, event: on.CheckpointSaved) -> bool:
        self._saving = False
        return True

    def _timer_fired(self, event: on.TimerFired) -> bool:
        heappop(self._alarms)  # they fire in order
        self._check_for_engines()
        return True

    def _shutdown_requested(self, event: on.ShutdownRequested) -> bool:
        if self._stopping is None:
            self._stopping = event.why
            self._drain(event.why, "shutdown")
            for flight in self.flights.all():
                self._cancel(flight, "shutdown", event.why)
            for group in list(self._eval_queue):
                self._give_up(group)
            self._eval_queue.clear()
        return True

    # ── launching ──

    def _advance(self, may_cut: bool) -> None:
        """Cut what can be cut, start what may start, and finish when nothing is left to do.

        `may_cut` False: what happened cannot have filled a batch. Most events are of that kind.
        """
        if may_cut:
            self._cut_batches()
        if self._is_finite and self._draining is None and self._out_of_tasks():
            self._finish_sources()
        self._fill()
        if self._draining is not None:
            self._maybe_finish()

    def _fill(self) -> None:
        """Start rollouts while there is a permit and something to start: evals up to their limit, then training."""
        free = self.fleet.free()
        if free <= 0:
            return
        eval_limit = self._eval_limit() if self._eval_queue else 0
        while free > 0:
            if self._eval_queue and self.flights.evals < eval_limit:
                self._start_eval()
            elif not self._start_train():
                return
            free -= 1

    def _eval_limit(self) -> int:
        """Evals that may be in flight: their share, or what training could not use even when all its places are free.

        Not simply what training cannot use now: a long eval would hold the permits when the next version opens places.
        """
        cap = self.fleet.cap()
        if self._draining is not None:
            return cap
        return max(1, int(self.setup.eval_share * cap), cap - self.pacing.most)

    def _start_eval(self) -> None:
        group = self._eval_queue[0]
        self._start(group)
        if not group.owes_launches:
            self._eval_queue.popleft()

    def _start_train(self) -> bool:
        """Continue an open group, else open a fresh one; False when neither may start now."""
        if self._draining is not None:
            return False
        group = self._oldest_owing() if self._owing else None
        if group is None:
            if not self._has_place():
                return False
            task = self.curriculum.draw(self._rate_allows)
            if task is None:
                return False
            group = self._open(task)
        env = group.task.env
        if env in self._rates:
            self._rates[env].take(self._now)
        self._start(group)
        if not group.owes_launches:
            self._launchable[env].popleft()
            self._owing -= 1
        return True

    def _has_place(self) -> bool:
        if self.pacing.free(self.cut, self.fleet.held) > 0:
            return True
        # A token-sized batch can be misjudged: if every place is taken by what is listed, and that is not enough
        # for a batch, nothing would ever move again. One more group does.
        idle = not self.flights.trains and not self._processing and not self._owing
        return idle and self.pacing.may_cut(self.cut + 1, self.fleet.held)

    def _oldest_owing(self) -> OpenGroup | None:
        """The oldest group with members to start, of an environment that may start one now."""
        best: OpenGroup | None = None
        for env, queue in self._launchable.items():
            if queue and (best is None or queue[0].id < best.id) and self._rate_allows(env):
                best = queue[0]
        return best

    def _rate_allows(self, env: EnvName) -> bool:
        rate = self._rates.get(env)
        if rate is None or rate.free(self._now):
            return True
        at = rate.next_at(self._now)
        # One alarm is enough: what it cannot start yet asks again. Without the test, two limited environments would
        # set two alarms at each alarm.
        if not self._alarms or at < self._alarms[0]:
            self._wake_at(at, f"env {env!r} may start its next rollout then")
        return False

    def _wake_at(self, at: float, reason: str) -> None:
        heappush(self._alarms, at)
        self._out.append(do.WakeAt(at, reason))

    def _open(self, task: TaskRef) -> OpenGroup:
        """Open a train group and take its places."""
        group = self._new_group(task, self._specs[task.env].group_size)
        self._launchable[task.env].append(group)
        self._owing += 1
        group.places = group.size
        self.pacing.taken += group.places
        return group

    def _new_group(self, task: TaskRef, size: int) -> OpenGroup:
        number = self._next_group
        self._next_group += 1
        return self.groups.open(number, task, size, mix(self._group_key, number) >> 1)

    def _start(self, group: OpenGroup) -> None:
        engine = self.fleet.place(group.engine)
        if engine is None:
            raise InvariantError(f"no engine has room for group {group.id}, but a permit was free")
        if group.engine is None:
            group.engine = engine.id
        rollout = group.next_member()
        task = group.task
        account = self.account.of(task.split, task.env)
        self.account.launched(account)
        flight = Flight(rollout, task, engine.id, self._now, account)
        engine.add(flight)
        self.flights.add(flight)
        if self._learner is not None:
            self._learner.started(engine, flight, self._now)
        noise = mix(self._noise_key, rollout.group * _MEMBERS + rollout.member) >> 1
        self._out.append(do.StartRollout(rollout, task, group.seed, noise, engine.id, engine.held))

    # ── turns ──

    def _ask_gate(self, flight: Flight) -> None:
        engine = self.fleet[flight.engine]
        if engine.out is not None:
            if self.fleet.is_empty:
                self.fleet.homeless.append(flight)
                return
            engine = self._move(flight)
        if self.fleet.gate_open(engine) and not engine.waiting and self._fits(flight, engine):
            self._grant(flight, engine)
        else:
            engine.wait(flight)
            self._release_gate(engine)

    def _fits(self, flight: Flight, engine: EngineState) -> bool:
        """Whether the engine's memory has room for this call; one may always run."""
        if self._learner is None or not engine.calls:
            return True
        limit = self._learner.turn_tokens(engine.id)
        return limit is None or engine.calling_tokens + flight.context <= limit

    def _grant(self, flight: Flight, engine: EngineState) -> None:
        flight.calling = True
        flight.at_gate = False
        flight.granted_at = self._now
        engine.calls += 1
        engine.calling_tokens += flight.context
        if not flight.sampled:
            self.flights.sampled_since(flight, engine.held)
        if self._learner is not None:
            self._learner.turn_granted(engine, flight, self._now)
        self._out.append(do.GrantTurn(flight.id, engine.id, engine.held, self.setup.segment_tokens))

    def _release_gate(self, engine: EngineState) -> None:
        """Let through what may go on, oldest rollout first: a younger one does not slip past one that does not fit."""
        if not engine.waiting or not self.fleet.gate_open(engine):
            return
        while (flight := engine.next_waiting()) is not None and self._fits(flight, engine):
            heappop(engine.waiting)
            self._grant(flight, engine)

    def _still_waits(self, flight: Flight) -> bool:
        # One that reached its deadline at the gate has ended meanwhile.
        return flight.cancelled is None and flight.id in self.flights

    def _move(self, flight: Flight) -> EngineState:
        """Place a flight whose engine is out on another one, over its cap if need be: it holds a permit already."""
        engine = self.fleet.place(None) or min(
            (e for e in self.fleet.engines() if e.usable), key=lambda e: e.in_flight
        )
        self.fleet[flight.engine].remove(flight)
        engine.add(flight)
        return engine

    # ── parking ──

    def _note_cap(self, engine: EngineState) -> None:
        """Tell the journal when a cap has changed by more than a twentieth, or for another kind of reason."""
        cap, reason = self._admission.cap(engine.id), self._admission.reason(engine.id)
        before, why = engine.noted
        if abs(cap - before) * 20 > before or (cap == before and reason[:24] != why[:24]):
            engine.noted = (cap, reason)
            self._out.append(do.NoteCap(engine.id, cap, reason))

    def _shed(self, engine: EngineState, count: int, why: str) -> None:
        """Take the youngest rollouts off an engine: parked with what they have, or cancelled where that is off."""
        parks = self.setup.park
        running = [
            f
            for f in engine.flights.values()
            if f.cancelled is None and not f.parked and (parks or f.task.split == "train")
        ]
        for flight in nlargest(count, running):
            if parks:
                self._park(flight, engine, why)
            else:
                self._cancel(flight, "overload", why)

    def _park(self, flight: Flight, engine: EngineState, why: str) -> None:
        flight.parked = True
        engine.parked += 1
        engine.working_tokens -= flight.context
        heappush(engine.parked_line, flight)
        self._out.append(do.ParkRollout(flight.id, why))

    def _resume_parked(self, engine: EngineState) -> None:
        """Let parked rollouts go on while the cap has room; they come before new ones."""
        while engine.parked and engine.out is None and engine.active < self._admission.cap(engine.id):
            flight = engine.oldest_parked()
            if flight is None:
                return
            heappop(engine.parked_line)
            flight.parked = False
            engine.parked -= 1
            engine.working_tokens += flight.context
            self._out.append(
                do.ResumeRollout(flight.id, f"{engine.active} of {self._admission.cap(engine.id)} run")
            )
            if flight.at_gate:
                self._ask_gate(flight)

    def _rehouse_parked(self) -> None:
        """Parked rollouts of engines that are not used any more wait at others."""
        if self.fleet.is_empty:
            return
        for lost in self.fleet.engines():
            if lost.out is None or not lost.parked:
                continue
            # One whose call has not come back yet is moved when it asks for the next.
            for flight in [f for f in lost.flights.values() if f.parked and not f.calling]:
                self._resume_parked(self._move(flight))

    # ── cancelling ──

    def _cancel(self, flight: Flight, cause: CancelCause, reason: str) -> None:
        if flight.cancelled is not None:
            return
        flight.cancelled = cause
        if flight.calling:
            self.fleet[flight.engine].calls_to_stop += 1
        self._out.append(do.CancelRollout(flight.id, cause, reason))

    def _give_up(self, group: OpenGroup) -> None:
        """Members of this group that have not started never will."""
        retries = list(group.retries)
        given_up, closed = self.groups.give_up_unlaunched(group.id)
        if group.task.split == "eval":
            self._settle_eval(closed)
            return
        group.places -= given_up
        self.pacing.taken -= given_up
        for rollout in retries:
            # Its tokens were settled as failed when it ended; the verdict on the record must not count them again.
            group.tokens[rollout.id] = 0
            self.account.of("train", group.task.env).move("failed", "grouped", 0)
        self._process(group, closed)

    def _drain(self, why: str, cause: CancelCause) -> None:
        """Start no more training rollouts and stop those that run."""
        if self._draining is None:
            self._draining = why
        for queue in self._launchable.values():
            while queue:
                self._owing -= 1
                self._give_up(queue.popleft())
        for flight in self.flights.all():
            if flight.task.split == "train":
                self._cancel(flight, cause, why)

    # ── endings and training ──

    def _may_retry(self, rollout: Rollout) -> bool:
        if self._draining is not None or rollout.outcome.ending != "failed":
            return False
        limit = self._specs[rollout.task.env].max_attempts
        return rollout.outcome.cause in _RETRIED and rollout.id.attempt + 1 < limit

    def _process(self, group: OpenGroup, closed: ClosedGroup | None) -> None:
        if closed is None:
            return
        self._processing[group.id] = group
        self._out.append(do.ProcessGroup(closed, "its last member has ended"))

    def _forget(self, group: GroupId) -> None:
        self._out.append(do.ForgetGroup(group))

    def _cut_batches(self) -> None:
        while self.cut < self.setup.max_steps and self.pacing.may_cut(self.cut + 1, self.fleet.held):
            # Before readiness is judged: what has just been listed may be stale already.
            self._sweep_list()
            if not self.list.ready():
                return
            self._cut(short=False)

    def _cut(self, short: bool) -> None:
        step = self.cut + 1
        batch = self.list.cut(step, short=short)
        self.cut = step
        shipped: dict[RolloutId, EnvName] = {}
        for sample in batch.samples:
            first = sample.rollout not in shipped
            shipped[sample.rollout] = sample.env
            account = self.account.of("train", sample.env)
            account.move("queued", "shipped", sample.trainable_tokens, rollouts=int(first))
        self.pacing.shipped(len(batch.rollouts), batch.tokens)
        self._unacknowledged += 1
        why = "what is left when every source is exhausted" if short else "the batch is full"
        self._out.append(do.ShipBatch(batch, why))
        self._cancel_stale()
        self.account.check()
        if step == self.setup.max_steps:
            self._drain(f"the last batch, step {step}, was cut", "surplus")

    def _sweep_list(self) -> None:
        """Drop from the list (or mask) what the batch being collected could only train beyond the bound."""
        for stale in self.list.sweep(self.cut + 1, self.setup.max_staleness, self._on_stale):
            whole = stale.action == "dropped"
            if whole:
                self.pacing.taken -= 1
            if stale.action != "trained":
                account = self.account.of("train", stale.env)
                account.move("queued", "stale", stale.tokens, rollouts=int(whole))
            self._out.append(do.NoteStale(stale.rollout, stale.action, stale.tokens, stale.reason))

    def _cancel_stale(self) -> None:
        """The next step trains a newer version: stop what could only train beyond the bound."""
        step = self.cut + 1
        oldest = oldest_allowed(step, self.setup.max_staleness)
        for flight in self.flights.older_than(oldest):
            if self._on_stale[flight.task.env] == "drop":
                self._cancel(
                    flight, "stale", f"sampled since v{flight.oldest}; step {step} takes v{oldest} or newer"
                )

    # ── weights ──

    def _update_engines(self, why: str) -> None:
        fleet = self.fleet
        for engine in fleet.to_update():
            engine.loading = fleet.newest
            self._out.append(do.UpdateWeights(engine.id, fleet.newest, fleet.path, why))

    def _take_out(self, engine: EngineState, why: str) -> None:
        """Use an engine no more, until it joins again; what waited for it goes elsewhere."""
        self._out.append(do.ReviveEngine(engine.id, why))
        for flight in self.fleet.taken_out(engine, why):
            if self._still_waits(flight):
                self._ask_gate(flight)
        self._rehouse_parked()
        if self.fleet.is_empty:
            self._no_engine_since = self._now
            wait_s = self.setup.engine_wait_s
            self._wake_at(self._now + wait_s, f"no engine is usable; the run waits {wait_s:g} s for one")
        self._open_due_evals()

    def _house_the_homeless(self) -> None:
        if self.fleet.homeless and not self.fleet.is_empty:
            homeless, self.fleet.homeless = self.fleet.homeless, []
            for flight in homeless:
                if self._still_waits(flight):
                    self._ask_gate(flight)
        self._rehouse_parked()

    def _check_for_engines(self) -> None:
        if self.fleet.is_empty and self._now >= self._no_engine_since + self.setup.engine_wait_s - 1e-6:
            raise EngineError(
                f"no engine has been usable for {self.setup.engine_wait_s:g} s (engine.lost_s): "
                f"{self.fleet.why_empty()}; mend them and resume the run"
            )

    def _count_failure(self, engine: EngineState, error: str) -> None:
        """Calls fail now and then; several in a row are the engine's fault."""
        engine.failed_calls += 1
        if engine.failed_calls >= FAILED_CALLS and engine.out is None:
            self._take_out(engine, f"{engine.failed_calls} calls in a row failed, the last: {error}")

    # ── evals ──

    def _open_due_evals(self) -> None:
        """Evals that are due now that every usable engine holds `held`."""
        if self._stopping is not None or not any(e.usable for e in self.fleet.engines()):
            return
        for due in self.plan.held(self.fleet.held):
            section = self._eval_sections[due.env]
            epoch = EvalEpoch(due.env, due.version, examples=self.setup.examples[due.env], k=section.k)
            while epoch.undrawn:
                group = self._new_group(TaskRef(due.env, "eval", epoch.draw()), section.k)
                self._epochs[group.id] = epoch
                self._eval_queue.append(group)

    def _settle_eval(self, closed: ClosedGroup | None) -> None:
        if closed is None:
            return
        self._forget(closed.id)
        epoch = self._epochs.pop(closed.id)
        epoch.settle(closed)
        # A measurement that a shutdown cut short says nothing; a resumed run makes it again.
        if epoch.complete and self._stopping is None:
            self.plan.complete(epoch.env, epoch.version)
            self._out.append(epoch.report())

    # ── the end ──

    def _out_of_tasks(self) -> bool:
        """Nothing left to draw, and nothing on its way that could still fill a batch."""
        return (
            self.curriculum.exhausted
            and not self._owing
            and not self.flights.trains
            and not self._processing
            and not self.list.ready()
        )

    def _finish_sources(self) -> None:
        if self.setup.short_last and len(self.list) and self.pacing.may_cut(self.cut + 1, self.fleet.held):
            self._cut(short=True)
        elif self.setup.short_last and len(self.list):
            return
        self._drain("every source is exhausted", "surplus")
        self.plan.end_at(self.cut)
        self._open_due_evals()

    def _save(self, why: str) -> None:
        self._saving = True
        self._out.append(do.SaveCheckpoint(self.cut, self.snapshot(), why))

    def _maybe_finish(self) -> None:
        if self._saving or self._finished:
            return
        if len(self.flights) or self._processing or self._unacknowledged or self._eval_queue:
            return
        if self._stopping is None and (min(self.fleet.held, self._trained) < self.cut or self._epochs):
            return
        if not self._closing:
            self._closing = True
            self._save("the run ends")
            return
        self._finished = True
        if self._stopping is not None:
            self._out.append(do.FinishRun("stopped", self._stopping))
            return
        for left in self.list.clear():
            trainable = sum(sample.trainable_tokens for sample in left.samples)
            self.account.of("train", left.env).move("queued", "left_over", trainable)
        self.account.check()
        self._out.append(do.FinishRun("done", self._draining or "every step was taken"))

    # ── resuming ──

    def snapshot(self) -> dict[str, Any]:
        """State that `restore` takes back. Groups under way are not in it: their tasks are drawn again."""
        unfinished = [g.task for g in self.groups.groups() if g.task.split == "train"]
        unfinished += [g.task for g in self._processing.values()]
        unfinished += self._cut_short
        return {
            "cut": self.cut,
            "next_group": self._next_group,
            "curriculum": self.curriculum.snapshot(unfinished),
            "list": self.list.snapshot(),
            "plan": self.plan.snapshot(),
            "account": self.account.snapshot(),
            "admission": self._admission.snapshot(),
        }

    def restore(self, state: dict[str, Any], trained: int, path: str = "") -> None:
        """Go on from a snapshot; `trained` is the step the trainer goes on from, at most the snapshot's.

        `path` is where that version's weights are, for engines that join without them. Call before the first event.
        What did not fit is in `warnings`.
        """
        self.cut = state["cut"]
        self._trained = self.fleet.newest = self.fleet.held = trained
        self.fleet.path = path
        self._next_group = state["next_group"]
        self.warnings = self.curriculum.restore(state["curriculum"])
        self.list.restore(state["list"])
        self.plan.restore(state["plan"])
        self.account.restore(state["account"])
        self._admission.restore(state.get("admission", {}))
        self.pacing.taken = len(self.list)
