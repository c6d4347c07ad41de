"""The core: composes the parts, decides nothing alone.

`Core.handle(event, now)` takes one event and returns the commands it causes. The cost of an event does not depend on
how many rollouts are in flight, except where it must act on many of them (a sweep of stale ones, a shutdown).

    events ──▶ Core.handle ──▶ commands
                 │  launching   curriculum, pacing, rates → groups → fleet (which engine) → flights (a permit)
                 │  turns       the gate, parking, engines that come and go
                 │  endings     flights → groups → ProcessGroup | eval ledger
                 │  training    GroupProcessed → batch list → ShipBatch → sweep
                 │  scheduling  the policy: rounds, what goes first, what is held, put off, thrown away
                 │  weights     fleet: PolicyPublished → UpdateWeights → WeightsLoaded
                 └─ the end     drain → last weights → last evals → checkpoint → FinishRun
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.core.accounting import Account
from paceline.core.admission import Admission
from paceline.core.batching import BatchList, DeadStreak
from paceline.core.continuing import Continuing
from paceline.core.desk import CoreDesk
from paceline.core.evaluation import EvalEpoch, EvalPlan
from paceline.core.fleet import Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.launching import Launcher
from paceline.core.outbox import Outbox
from paceline.core.parts import UnderWay
from paceline.core.retries import Retries
from paceline.core.scheduling import Overlap, Scheduling
from paceline.core.setup import CoreSetup
from paceline.core.staleness import oldest_allowed
from paceline.core.turns import Turns
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import ClosedGroup, GroupResult
from paceline.domain.ids import EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import CancelCause, Rollout
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError, TrainerError

FORMAT = 2
"""Of snapshots. 1 had no groups under way and no place in the journal."""


class Core:
    """All decisions of one run."""

    def __init__(self, setup: CoreSetup, admission: Admission, scheduling: Scheduling | None = None) -> None:
        """Without `scheduling`, the policy is `overlap` with the setup's lag."""
        self.setup = setup
        self.scheduling = policy = scheduling or Overlap()
        self.account = Account()
        self.fleet = Fleet(admission)
        self.flights = Flights()
        self.groups = GroupLedger()
        self._out = out = Outbox()
        self.turns = Turns(setup, admission, policy, self.fleet, self.flights, self.account, out)
        self.launcher = Launcher(
            setup, admission, policy, self.fleet, self.flights, self.groups, self.account, out
        )
        self._retries = Retries(setup, self.groups, self.launcher, self.account, out)
        self.continuing = Continuing(
            admission, policy, self.fleet, self.flights, self.groups, self.launcher, out
        )
        self.curriculum = self.launcher.curriculum
        self.pacing = self.launcher.pacing
        self.list = BatchList(rollouts=setup.target_rollouts, tokens=setup.target_tokens)
        self.dead = DeadStreak(setup.dead_group_limit)
        self.plan = EvalPlan(setup.evals, last=setup.max_steps)
        self.warnings: list[str] = []
        """Set by `restore`: what of the checkpoint did not fit."""
        self.desk = CoreDesk(
            setup,
            self.fleet,
            self.flights,
            self.groups,
            self.list,
            self.account,
            self.launcher,
            self.turns,
            self.continuing,
            out,
        )
        policy.attach(self.desk)
        self._rounds = policy if policy.has_rounds else None
        self._ordered = policy if policy.has_order else None
        self._hears_endings = policy if policy.hears_endings else None
        self._admission = admission
        self._eval_sections = {section.label: section for section in setup.evals}
        self._is_finite = all(s.source.size is not None and s.source.epochs is not None for s in setup.train)
        """Whether the tasks can run out."""
        self._on_stale = {spec.name: spec.on_stale for spec in setup.train}
        self._epochs: dict[GroupId, EvalEpoch] = {}
        """Open eval groups, and the measurement each belongs to."""
        self._cut_short: list[TaskRef] = []
        """Tasks whose group the end of the run stopped before it could bring anything."""
        self._measured: Version | None = None
        """The version that evals were last opened for, where any was due."""
        self._unacknowledged = 0
        """Batches handed to the shell and not reported shipped."""
        self._trained = 0
        self._draining: str | None = None
        """Why no more training rollouts are started."""
        self._stopping: str | None = None
        """Why the run ends early: evals stop too."""
        self._save_due = ""
        """Why a checkpoint is due; empty while none is."""
        self._save_by = setup.checkpoint_every_s
        """When the next one is, however few steps it has been."""
        self._saving = False
        self._closing = False
        """Whether the last checkpoint has been asked for."""
        self._finished = False
        self._handlers: dict[type, Callable[[Any], bool]] = {
            on.RunOpened: self._run_opened,
            on.EngineJoined: self._engine_joined,
            on.EngineLost: self._engine_lost,
            on.LoadReported: self._load_reported,
            on.PolicyPublished: self._policy_published,
            on.WeightsLoaded: self._weights_loaded,
            on.TurnRequested: self.turns.turn_requested,
            on.SegmentEnded: self.turns.segment_ended,
            on.RolloutContinued: self._rollout_continued,
            on.RolloutEnded: self._rollout_ended,
            on.GroupProcessed: self._group_processed,
            on.BatchShipped: self._batch_shipped,
            on.StepTrained: self._step_trained,
            on.CheckpointSaved: self._checkpoint_saved,
            on.TimerFired: self._timer_fired,
            on.RunHeld: self._run_held,
            on.ShutdownRequested: self._shutdown_requested,
        }

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def cut(self) -> int:
        """Batches cut so far: the step being collected is the next one."""
        return self.desk.cut

    @property
    def processing(self) -> Mapping[GroupId, OpenGroup]:
        """Train groups that have closed and are being processed."""
        return self.desk.processing

    @property
    def trained(self) -> int:
        """Newest step the trainer acknowledged."""
        return self._trained

    @property
    def unshipped(self) -> int:
        """Batches that were cut and not reported shipped."""
        return self._unacknowledged

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving

    @property
    def next_alarm(self) -> float | None:
        """When the next `TimerFired` is due, on the run's clock; None when none was asked for."""
        return self._out.next_alarm

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide. `now` in seconds on the run's clock, never going back.

        Raises NoProgressError when too many groups in a row brought nothing to train, EngineError when no engine is
        left, InvariantError when an event contradicts what the core knows. Each ends the run.
        """
        if self._finished:
            self._out.seq += 1
            return []  # a version or a reading that came late: there is nothing left to decide
        commands = self._out.begin(now)
        may_go_on = self._handlers[type(event)](event)
        if self.fleet.held != self._measured and self._open_due_evals():
            may_go_on = True
        if may_go_on:
            self._advance(may_cut=type(event) is not on.RolloutEnded or self.scheduling.repeats)
            if self._save_due:
                self._save_if_due()
        return commands

    # ── what each event changes; returns whether anything may start or finish because of it ──

    def _run_opened(self, event: on.RunOpened) -> bool:
        for env in event.forgives:
            self.curriculum.quarantine.forget(env)
        self.continuing.opened(event.continues)
        return True

    def _engine_joined(self, event: on.EngineJoined) -> bool:
        engine = self.fleet.joined(event, catch_up=self.fleet.held)
        if engine.ready and event.version > self.fleet.newest:
            self.fleet.newest = event.version
        self.turns.update_engines("the engine joined with older weights")
        self.turns.house_the_homeless()
        if self._draining is None and self.cut >= self.setup.max_steps:
            # Resumed when only the last weights, evals or the end itself were missing.
            self._drain(f"step {self.cut} was the last", "surplus")
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
        self.turns.update_engines(f"v{event.version} was published")
        return False

    def _engine_lost(self, event: on.EngineLost) -> bool:
        self.turns.engine_lost(event)
        return True

    def _load_reported(self, event: on.LoadReported) -> bool:
        self.turns.load_reported(event)
        return True

    def _weights_loaded(self, event: on.WeightsLoaded) -> bool:
        self.turns.loaded(event)
        return True

    def _rollout_continued(self, event: on.RolloutContinued) -> bool:
        self.continuing.continued(event)
        return False

    def _rollout_ended(self, event: on.RolloutEnded) -> bool:
        rollout = event.rollout
        flight = self.flights.remove(rollout.id)
        if rollout.outcome.cause == "restart":
            self._retries.cut_off(flight, rollout)
            return False
        if flight.calling:
            raise InvariantError(f"{rollout.id} ended while its call to {flight.engine!r} was still running")
        if flight.engine:  # else it was cancelled before it could go on in this life
            self.turns.ended(flight)
        group = self.groups.of(rollout.id)
        if rollout.task.split == "eval":
            flight.account.move("in_flight", "eval", flight.sampled)
            self._settle_eval(self.groups.settle(rollout))
            return True
        if self._ordered is not None:
            self._ordered.left(flight)
        if (note := self.launcher.breakers.ended(rollout, self._out.now)) is not None:
            self._out.say(note)
        if self._draining is None and self._retries.failed(flight, rollout, group):
            return True
        flight.account.move("in_flight", "grouped", flight.sampled)
        group.tokens[rollout.id] = flight.sampled
        if rollout.outcome.cause == "deferred" and rollout.outcome.ending == "cancelled":
            self.desk.give_place(group)  # it comes back with another group
        if self._draining is None and self._retries.failed_whole(rollout, group):
            return True
        self.desk.process(group, self.groups.settle(rollout))
        if self._hears_endings is not None:
            self._hears_endings.rollout_ended(flight, rollout, group)
        return True

    def _group_processed(self, event: on.GroupProcessed) -> bool:
        result = event.result
        group = self.desk.processing.pop(result.group, None)
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
            ships = sum([sample.trainable_tokens for sample in verdict.samples])
            if ships != sampled:
                account.move("queued", "overlong", sampled - ships, rollouts=0)
            self.list.add(verdict, env)
        if tokens:
            raise InvariantError(f"group {result.group}: no verdict on {sorted(map(str, tokens))}")
        refused = self.curriculum.closed(group.task, result)
        if (held := self.curriculum.quarantined(group.task, result)) is not None:
            self._out.say(held)
        self.pacing.taken -= group.places - listed
        if refused and listed:
            result, listed = self._refuse(result, refused), 0
        self._forget(result.group)
        if self._draining is not None and not listed and self._begins_again(group, result):
            return True  # as a whole: nothing of it is put off as well
        if self._hears_endings is not None:
            self._hears_endings.group_processed(group, result)
        if self._draining is None and (note := self.dead.add(result, env, event.error or refused or None)):
            self._out.say(note)
        return True

    def _begins_again(self, group: OpenGroup, result: GroupResult) -> bool:
        """Whether the end cut a group short that brought nothing: it says nothing about the task, which a resumed run begins
        again."""
        if not group.closed_unlaunched and all(v.fate != "cancelled" for v in result.verdicts):
            return False
        if any(verdict.rollout.group != group.id for verdict in result.verdicts):
            return False  # it was split from another, whose members have told what they could
        if any(kept.task == group.task for kept in self.launcher.kept.values()):
            return False  # the policy had put the task off before the end came
        if (kept := group.put_off) is None:
            self._cut_short.append(group.task)
        else:
            self.launcher.kept[kept.number] = kept
        self._out.say(do.NoteRedraw(group.task, 0 if kept is None else kept.number))
        return True

    def _refuse(self, result: GroupResult, why: str) -> GroupResult:
        """Throw a group away that is listed; the result as it then stands, for whoever hears of it after the gates."""
        self.desk.discard([verdict.rollout for verdict in result.verdicts if verdict.fate == "queued"], why)
        verdicts = [
            msgspec.structs.replace(v, fate="discarded", reason=why) if v.fate == "queued" else v
            for v in result.verdicts
        ]
        return msgspec.structs.replace(result, verdicts=tuple(verdicts), dead="gated")

    def _batch_shipped(self, event: on.BatchShipped) -> bool:
        self._unacknowledged -= 1
        setup = self.setup
        if event.step % setup.checkpoint_every == 0 and event.step < setup.max_steps:
            self._save_due = f"every {setup.checkpoint_every} steps"
        elif self._out.now >= self._save_by and event.step < setup.max_steps:
            self._save_due = f"every {setup.checkpoint_every_s:g} s"
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
        self._out.woken()
        self.turns.check_for_engines()
        return True

    def _run_held(self, event: on.RunHeld) -> bool:
        self.fleet.stopped = event.why
        for engine in self.fleet.engines():
            self.turns.release_gate(engine)
        return not event.why

    def _shutdown_requested(self, event: on.ShutdownRequested) -> bool:
        if self._stopping is None:
            self._stopping = event.why
            self._drain(event.why, "shutdown")
            for flight in self.flights.all():
                self.desk.cancel(flight, "shutdown", event.why)
            for group in self.launcher.stop_evals():
                self._settle_eval(self.launcher.give_up(group))
        return True

    # ── going on ──

    def _advance(self, may_cut: bool) -> None:
        """Cut what can be cut, start what may start, and finish when nothing is left to do.

        `may_cut` False: what happened cannot have filled a batch. Most events are of that kind.
        """
        if self._rounds is not None and self._draining is None:
            self._rounds.advance()
        if may_cut:
            self._cut_batches()
        if self._is_finite and self._draining is None and self._out_of_tasks():
            self._finish_sources()
        self.continuing.fill()
        self.launcher.fill(
            self.cut, draining=self._draining is not None, processing=len(self.desk.processing)
        )
        if self._draining is not None:
            self._maybe_finish()

    def _drain(self, why: str, cause: CancelCause) -> None:
        """Start no more training rollouts and stop those that run."""
        if self._draining is None:
            self._draining = why
        for group in self.launcher.stop_training():
            self.desk.process(group, self.launcher.give_up(group))
        for flight in self.flights.all():
            if flight.task.split == "train":
                self.desk.cancel(flight, cause, why)

    # ── endings and training ──

    def _forget(self, group: GroupId) -> None:
        self._out.say(do.ForgetGroup(group))

    def _cut_batches(self) -> None:
        while self.cut < self.setup.max_steps and self.scheduling.may_cut(self.cut + 1, self.fleet.held):
            # Before readiness is judged: what has just been listed may be stale already.
            self._sweep_list()
            if not self.list.ready():
                return
            self._cut(short=False)

    def _cut(self, short: bool) -> None:
        step = self.cut + 1
        whole = self.scheduling.cuts_whole
        batch = self.list.cut(step, short=short, whole=whole, bound=self.setup.max_staleness)
        self.desk.cut = step
        shipped: dict[RolloutId, EnvName] = {}
        for sample in batch.samples:
            first = sample.rollout not in shipped
            shipped[sample.rollout] = sample.env
            account = self.account.of("train", sample.env)
            account.move("queued", "shipped", sample.trainable_tokens, rollouts=int(first))
        self.pacing.shipped(len(batch.rollouts), batch.tokens)
        self._unacknowledged += 1
        why = "what is left when every source is exhausted" if short else "the batch is full"
        self._out.say(do.ShipBatch(batch, why))
        if self._rounds is not None:
            self._rounds.batch_cut()
        self._cancel_stale()
        self.account.check()
        if step == self.setup.max_steps:
            self._drain(f"step {step} was the last", "surplus")

    def _sweep_list(self) -> None:
        """Drop from the list (or mask) what the batch being collected could only train beyond the bound."""
        for stale in self.list.sweep(self.cut + 1, self.setup.max_staleness, self._on_stale):
            whole = stale.action == "dropped"
            if whole:
                self.pacing.taken -= 1
                if self.curriculum.mix is not None:
                    self.curriculum.mix.lost(stale.env, 1, stale.tokens)
            if stale.action != "trained":
                account = self.account.of("train", stale.env)
                account.move("queued", "stale", stale.tokens, rollouts=int(whole))
            self._out.say(do.NoteStale(stale.rollout, stale.action, stale.tokens, stale.reason))

    def _cancel_stale(self) -> None:
        """The next step trains a newer version: stop what could only train beyond the bound."""
        step = self.cut + 1
        oldest = oldest_allowed(step, self.setup.max_staleness)
        for flight in self.flights.older_than(oldest):
            if self._on_stale[flight.task.env] == "drop":
                self.desk.cancel(
                    flight, "stale", f"sampled since v{flight.oldest}; step {step} takes v{oldest} or newer"
                )

    # ── evals ──

    def _open_due_evals(self) -> bool:
        """Open the evals that are due now that every usable engine holds `held`; whether there were any."""
        if self._stopping is not None or self.fleet.is_empty:
            return False
        self._measured = self.fleet.held
        due = self.plan.held(self.fleet.held)
        for each in due:
            section = self._eval_sections[each.env]
            epoch = EvalEpoch(each.env, each.version, examples=self.setup.examples[each.env], k=section.k)
            while epoch.undrawn:
                group = self.launcher.open_eval(TaskRef(each.env, "eval", epoch.draw()), section.k)
                self._epochs[group.id] = epoch
        return bool(due)

    def _settle_eval(self, closed: ClosedGroup | None) -> None:
        if closed is None:
            return
        self._forget(closed.id)
        epoch = self._epochs.pop(closed.id)
        epoch.settle(closed)
        # A measurement that a shutdown cut short says nothing; a resumed run makes it again.
        if epoch.complete and self._stopping is None:
            self.plan.complete(epoch.env, epoch.version)
            self._out.say(epoch.report())

    # ── the end ──

    def _out_of_tasks(self) -> bool:
        """Nothing left to draw, and nothing on its way that could still fill a batch."""
        return (
            self.curriculum.exhausted
            and not self.launcher.kept
            and not self.launcher.owing
            and not self.flights.trains
            and not self.desk.processing
            and not self.list.ready()
        )

    def _finish_sources(self) -> None:
        if self.setup.short_last and len(self.list):
            if not self.scheduling.may_cut(self.cut + 1, self.fleet.held):
                return
            self._sweep_list()
            if len(self.list):
                self._cut(short=True)
        self._drain("every source is exhausted", "surplus")
        self.plan.end_at(self.cut)
        self._open_due_evals()

    def _save_if_due(self) -> None:
        # The last command of its record: the state holds all of that record, and recovery begins with the next. Not with a
        # batch between here and the trainer: a run resumed from that state would not ship it again.
        if not self._unacknowledged and not self._saving and self._draining is None:
            why, self._save_due = self._save_due, ""
            self._save(why)

    def _save(self, why: str) -> None:
        self._saving = True
        self._save_by = self._out.now + self.setup.checkpoint_every_s
        self._out.say(do.SaveCheckpoint(self.cut, self.snapshot(), why))

    def _maybe_finish(self) -> None:
        if self._saving or self._finished:
            return
        if len(self.flights) or self.desk.processing or self._unacknowledged or self.launcher.evals:
            return
        if self._stopping is None and (min(self.fleet.held, self._trained) < self.cut or self._epochs):
            return
        if not self._closing:
            self._closing = True
            self._save("the run ends")
            return
        self._finished = True
        if self._stopping is not None:
            self._out.say(do.FinishRun("stopped", self._stopping))
            return
        for left in self.list.clear():
            trainable = sum(sample.trainable_tokens for sample in left.samples)
            self.account.of("train", left.env).move("queued", "left_over", trainable)
        self.account.check()
        self._out.say(do.FinishRun("done", self._draining or "every step was taken"))

    # ── resuming ──

    def count_from(self, seq: int) -> None:
        """The next event handled is the journal's record `seq`."""
        self._out.seq = seq - 1

    def snapshot(self) -> dict[str, Any]:
        """State that `restore` takes back; msgpack-able. Rollouts are named, and are in the rollout store."""
        return {
            "format": FORMAT,
            "seq": self._out.seq + 1,
            "cut": self.cut,
            "next_group": self.launcher.next_group,
            "curriculum": self.curriculum.snapshot(self._cut_short),
            "groups": [g.plain(_id_of) for g in self.groups.groups() if g.task.split == "train"],
            "processing": [g.plain(_id_of) for g in self.desk.processing.values()],
            "flights": self.flights.plain(),
            "shipping": [],
            "list": self.list.snapshot(),
            "pacing": self.pacing.snapshot(),
            "plan": self.plan.snapshot(),
            "account": self.account.snapshot(),
            "admission": self._admission.snapshot(),
            "placement": self.fleet.placement.snapshot(),
            "scheduling": self.scheduling.snapshot(),
            "kept": [msgspec.to_builtins(each) for each in self.launcher.kept.values()],
            "put_offs": self.launcher.put_offs,
            "moved": self.groups.moved(),
        }

    def restore(
        self,
        state: dict[str, Any],
        trained: int,
        path: str = "",
        rollouts: Mapping[RolloutId, Rollout] | None = None,
    ) -> None:
        """Go on from a snapshot; `trained` is the step the trainer goes on from, at most the snapshot's.

        `path` is where that version's weights are, for engines that join without them. `rollouts` holds those that open
        groups name. Without it these groups are dropped, and their tasks drawn again. Call before the first event;
        `RunOpened` must let every flight of the snapshot go on, or an event that follows it must end it. What did not fit is in `warnings`.
        """
        self.desk.cut = state["cut"]
        self._trained = self.fleet.newest = self.fleet.held = trained
        self.fleet.path = path
        self.launcher.next_group = state["next_group"]
        under_way = [*state.get("groups", ()), *state.get("processing", ())]
        self.warnings = self.curriculum.restore(
            state["curriculum"],
            [TaskRef(*g["task"]) for g in under_way if rollouts is None and g["put_off"] is None],
        )
        self.list.restore(state["list"])
        self.pacing.restore(state.get("pacing", {}))
        self.plan.restore(state["plan"])
        self.account.restore(state["account"])
        self._admission.restore(state.get("admission", {}))
        self.fleet.placement.restore(state.get("placement", {}))
        self._unacknowledged = len(state.get("shipping", ()))
        self.scheduling.restore(state.get("scheduling", {}))
        dropped = [g["put_off"] for g in under_way if rollouts is None and g["put_off"] is not None]
        for each in [*state.get("kept", ()), *dropped]:
            kept = msgspec.convert(each, do.PutOff)
            self.launcher.kept[kept.number] = kept
        self.launcher.put_offs = state.get("put_offs", 0)
        self.pacing.taken = len(self.list)
        if rollouts is None:
            self.account.give_up()
            return
        self.groups.restore_moved(state.get("moved", ()))
        for each in state["groups"]:
            if each["task"][0] in self.curriculum.samplers:
                self.launcher.adopt(self.groups.take(OpenGroup.restore(each, rollouts.__getitem__)))
            else:
                self._drop(each)
        for each in state["processing"]:
            group = OpenGroup.restore(each, rollouts.__getitem__)
            self.pacing.taken += group.places
            self.curriculum.goes_on(group.task.env)
            self.desk.processing[group.id] = group
        for row in state["flights"]:
            left = UnderWay.restore(row)
            account = self.account.of(left.task.split, left.task.env)
            flight = Flight(left.id, left.task, "", left.started, account, left.started)
            flight.sampled, flight.requests, flight.stood = left.sampled, left.requests, left.stood
            flight.late = left.late
            self.continuing.left(flight, left.oldest)

    def _drop(self, group: dict[str, Any]) -> None:
        """An open group whose environment is not trained on any more."""
        env = group["task"][0]
        self.warnings.append(f"env {env!r} is gone: its open group {group['id']} is dropped")
        for name in group["arrived"]:
            self.account.of("train", env).move("grouped", "cancelled", group["tokens"][name])


def _id_of(rollout: Rollout) -> RolloutId:
    return rollout.id
