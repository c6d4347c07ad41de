"""Launching: which rollout starts next.

An open group is continued before a fresh one is opened, evals come up to their limit before training, and nothing starts
without a permit (admission), a place (pacing) and its environment's start rate.
"""

from __future__ import annotations

from collections import deque

from paceline.core.accounting import Account
from paceline.core.admission import Admission
from paceline.core.breaker import Breakers
from paceline.core.curriculum import Curriculum
from paceline.core.fleet import EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.outbox import Outbox
from paceline.core.pacing import Pacing
from paceline.core.quarantine import Quarantine
from paceline.core.rates import StartRate
from paceline.core.scheduling.base import Scheduling
from paceline.core.setup import CoreSetup
from paceline.core.streams import key, mix
from paceline.domain import commands as do
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError

_OPENED = "a place was free, and its task came next"
_GOES_ON = "an open group goes on first, on its engine"
_ELSEWHERE = "an open group goes on first; its own engine has no room"
_AGAIN = "its attempt before failed, and is tried again"
"""Reasons are words that exist once: a start costs no text."""

_MEMBERS = 1 << 16
"""More members than a group can have: keeps the noise counters of two groups apart."""


class Launcher:
    """Opens groups and starts their members."""

    def __init__(
        self,
        setup: CoreSetup,
        admission: Admission,
        scheduling: Scheduling,
        fleet: Fleet,
        flights: Flights,
        groups: GroupLedger,
        account: Account,
        out: Outbox,
    ) -> None:
        self.curriculum = Curriculum(
            [spec.source for spec in setup.train],
            setup.seed,
            mix=setup.mix() if setup.mix_by != "draws" else None,
            learning={spec.name: spec.sampler() for spec in setup.train if spec.sampler is not None},
            gates={spec.name: spec.gates() for spec in setup.train if spec.gates is not None},
            quarantine=Quarantine({s.name: s.patience for s in setup.train if s.patience is not None}),
        )
        self.pacing = Pacing(
            setup.lag, setup.target_rollouts, setup.target_tokens, tokens_guess=max(1, setup.seq_len // 2)
        )
        self.breakers = Breakers([spec.name for spec in setup.train], setup.outage_s, self._brings)
        self.next_group: GroupId = 0
        self.owing = 0
        """Open train groups with members to start."""
        self.evals: deque[OpenGroup] = deque()
        """Eval groups with members to start, oldest first."""
        self.kept: dict[int, do.PutOff] = {}
        """What the policy put off and has not been opened, by number, oldest first."""
        self.put_offs = 0
        """Put off so far."""
        self._setup = setup
        self._policy = scheduling
        self._repeats = scheduling.repeats
        self._learner = admission if admission.learns else None
        self._fleet = fleet
        self._flights = flights
        self._groups = groups
        self._account = account
        self._out = out
        self._specs = {spec.name: spec for spec in setup.train}
        self._most = {s.name: s.max_concurrent for s in setup.train if s.max_concurrent}
        self._rates = {s.name: StartRate(s.tasks_per_minute) for s in setup.train if s.tasks_per_minute}
        self._launchable: dict[EnvName, deque[OpenGroup]] = {spec.name: deque() for spec in setup.train}
        self._group_key = key(setup.seed, "group")
        self._noise_key = key(setup.seed, "noise")

    def fill(self, cut: int, *, draining: bool, processing: int) -> None:
        """Start rollouts while there is a permit and something to start: evals up to their limit, then training.

        `cut` batches were cut, `processing` groups are being processed; `draining` starts no more training.
        """
        if self._repeats and not draining and not self._fleet.is_empty:
            self._open_all(cut, processing)
        free = self._fleet.free()
        if free <= 0:
            return
        eval_limit = self._eval_limit(draining) if self.evals else 0
        by_order = self._policy.has_order
        if by_order and not draining:
            self._open_all(cut, processing)
        while free > 0:
            if self._learner is not None and self._fleet.free() <= 0:
                return  # a start may take more than one permit's room: a window of the burst rule began with it
            if self.evals and self._flights.evals < eval_limit:
                if not self._fits(self.evals[0], free):
                    return
                started = self._start_eval()
            elif draining:
                return
            elif by_order:
                started = int(self._policy.seat_next())
            else:
                started = self._start_train(cut, processing, free)
            if not started:
                return
            free -= started

    def open_eval(self, task: TaskRef, size: int) -> OpenGroup:
        """Queue one example of an eval."""
        group = self._new_group(task, size)
        self.evals.append(group)
        return group

    def try_again(self, group: OpenGroup) -> None:
        """Put a group in line whose member failed; call before the member is added to its retries."""
        if not group.owes_launches:
            self._launchable[group.task.env].appendleft(group)
            self.owing += 1
        self._policy.owes_again(group)

    def adopt(self, group: OpenGroup) -> None:
        """Take a train group of an earlier life in line, oldest first."""
        if group.needs == group.size:
            # What the policy held had given its place to others. In this life nothing is held yet, and all go on.
            put_off = sum(member.outcome.cause == "deferred" for member in group.arrived)
            group.places = group.size - group.closed_unlaunched - group.left - put_off
        self.pacing.taken += group.places
        self.curriculum.goes_on(group.task.env)
        self._policy.opened(group)
        if group.owes_launches:
            self._launchable[group.task.env].append(group)
            self.owing += 1

    def withdraw(self, group: OpenGroup) -> None:
        """Take one train group out of line, if it is there; the caller gives its members up."""
        if group.owes_launches:
            self._launchable[group.task.env].remove(group)
            self.owing -= 1

    def put_off(self, kept: do.PutOff) -> None:
        """Keep rollouts of a task for later."""
        self.kept[kept.number] = kept
        self._out.say(kept)

    def noise_of(self, rollout: RolloutId, group: OpenGroup) -> int:
        """The noise seed of a member: its own, or that of the response it samples again."""
        if group.put_off is not None and group.put_off.noise:
            return group.put_off.noise[rollout.member]
        return mix(self._noise_key, rollout.group * _MEMBERS + rollout.member) >> 1

    def may_start(self, env: EnvName) -> bool:
        """Whether a rollout of this environment may start now; sets an alarm for when it may."""
        return self._rate_allows(env)

    def start(self, group: OpenGroup, engine: EngineState) -> Flight:
        """Start the next member of an open train group there."""
        env = group.task.env
        if env in self._rates:
            self._rates[env].take(self._out.now)
        flight = self._start(group, engine)
        if not group.owes_launches:
            self._launchable[env].remove(group)
            self.owing -= 1
        return flight

    def stop_training(self) -> list[OpenGroup]:
        """Take every train group out of line; the caller gives their members up."""
        stopped = [group for queue in self._launchable.values() for group in queue]
        for queue in self._launchable.values():
            queue.clear()
        self.owing = 0
        return stopped

    def stop_evals(self) -> list[OpenGroup]:
        """The same for evals."""
        stopped = list(self.evals)
        self.evals.clear()
        return stopped

    def give_up(self, group: OpenGroup) -> ClosedGroup | None:
        """Members of this group that have not started never will; the group, if that closed it."""
        retries = list(group.retries)
        given_up, closed = self._groups.give_up_unlaunched(group.id)
        if group.task.split == "train":
            places = min(given_up, group.places)
            group.places -= places
            self.pacing.taken -= places
            for rollout in retries:
                # Its tokens were settled as failed when it was to be tried again; now the verdict on its record decides, which
                # may be that it trains: of a group that runs in one call, members that had ended well were to be tried again, too.
                tokens = group.tokens.setdefault(rollout.id, 0)
                self._account.of("train", group.task.env).move("failed", "grouped", tokens)
        return closed

    # ── inside ──

    def _eval_limit(self, draining: bool) -> int:
        """Evals that may be in flight: their share, or what training could not use even when all its places are free.

        Not simply what training cannot use now: a long eval would hold the permits when the next version opens places.
        """
        cap = self._fleet.cap()
        if draining:
            return cap
        return max(1, int(self._setup.eval_share * cap), cap - self._policy.most)

    def _start_eval(self) -> int:
        """Start the next; returns how many rollouts that was."""
        group = self.evals[0]
        started = self._start_members(group)
        if not group.owes_launches:
            self.evals.popleft()
        return started

    def _start_members(self, group: OpenGroup) -> int:
        """Start the next member of a group, or all of one that runs whole."""
        self._start(group)
        started = 1
        while group.owes_launches and self._is_whole(group):
            self._start(group)
            started += 1
        return started

    def _fits(self, group: OpenGroup, free: int) -> bool:
        """Whether a group may start its next member with `free` permits. One that runs whole starts with all of its
        members or waits, and nothing else is started before it; one that is larger than all permits together waits
        until nothing runs, and then runs alone: a wait for more permits than there are would never end."""
        if not self._is_whole(group) or free >= len(group.retries) + group.unlaunched:
            return True
        return not len(self._flights)

    def _is_whole(self, group: OpenGroup) -> bool:
        return (group.task.split, group.task.env) in self._setup.whole_groups

    def _start_train(self, cut: int, processing: int, free: int) -> int:
        """Continue an open group, else open a fresh one; returns how many rollouts started, 0 when neither may now."""
        if self.owing and not self._policy.may_start():
            return 0
        group = self._oldest_owing() if self.owing else None
        is_fresh = group is None
        if group is None:
            group = self._open_next(cut, processing)
            if group is None:
                return 0
        if not self._fits(group, free):
            if is_fresh:
                self._note_opened(group)
            return 0
        env = group.task.env
        started = self._start_members(group)
        if env in self._rates:
            for _ in range(started):
                self._rates[env].take(self._out.now)
        if not group.owes_launches:
            self._launchable[env].remove(group)  # the first, unless others wait for their engines
            self.owing -= 1
        return started

    def _open_all(self, cut: int, processing: int) -> None:
        while self._open_next(cut, processing) is not None:
            pass

    def _open_next(self, cut: int, processing: int) -> OpenGroup | None:
        """Open a group that has places: what was put off, if the policy wants it now, else a task that is drawn."""
        policy = self._policy
        idle = False
        if policy.places() <= 0:
            # A token-sized batch can be misjudged: if every place is taken by what is listed, and that is not enough
            # for a batch, nothing would ever move again. One more group does.
            idle = not self._flights.trains and not processing and not self.owing
            if not (idle and policy.may_cut(cut + 1, self._fleet.held)):
                return None
        if self.kept:
            kept = policy.next_put_off()
            if kept is not None:
                may_open = self._repeats or self._rate_allows(kept.task.env)
                return self._open_kept(kept, cut) if may_open else None
        if not (idle or policy.may_draw()):
            return None
        # What is drawn may not depend on the clock where the run is to repeat: then it is opened, and waits.
        task = self.curriculum.draw(_always if self._repeats else self._rate_allows)
        for passed in self.curriculum.skipped:
            self._out.say(do.SkipTask(passed))
        return None if task is None else self._open(task, cut)

    def _oldest_owing(self) -> OpenGroup | None:
        """The oldest group with members to start, of an environment that may start one now; those pass that had better
        wait for their own engine (`placement`)."""
        best: OpenGroup | None = None
        for env, queue in self._launchable.items():
            if queue and (best is None or queue[0].id < best.id) and self._rate_allows(env):
                found = self._fleet.first_to_go(queue, env, self._out.now)
                if found is not None and (best is None or found.id < best.id):
                    best = found
        return best

    def _rate_allows(self, env: EnvName) -> bool:
        """Whether an environment may start a rollout now, by its own limits."""
        most = self._most.get(env)
        if most is not None and self._flights.of_env.get(env, 0) >= most:
            return False  # the end of one of them asks again
        return self.may_go_on(env)

    def may_go_on(self, env: EnvName) -> bool:
        """Whether a rollout of an earlier life, which counts among those in flight already, may begin again now; sets an alarm
        for when it may. To its environment it is a start like any other."""
        if not self.breakers.allows(env, self._out.now):
            if (at := self.breakers.next_at(env)) is not None:
                self._ask_again(at, f"env {env!r} is out: one rollout is tried then")
            return False
        rate = self._rates.get(env)
        if rate is None or rate.free(self._out.now):
            return True
        self._ask_again(rate.next_at(self._out.now), f"env {env!r} may start its next rollout then")
        return False

    def went_on(self, flight: Flight) -> None:
        """One has begun again."""
        env = flight.task.env
        if env in self._rates:
            self._rates[env].take(self._out.now)
        self.breakers.started(flight.id, env)

    def _brings(self, env: EnvName) -> bool:
        """Whether an environment may yet bring something."""
        return (
            not self.curriculum.samplers[env].exhausted
            or self._flights.of_env.get(env, 0) > 0
            or bool(self._launchable[env])
            or any(kept.task.env == env for kept in self.kept.values())
        )

    def _ask_again(self, at: float, reason: str) -> None:
        # One alarm is enough: what it cannot start yet asks again. Without the test, two limited environments would
        # set two alarms at each alarm.
        alarm = self._out.next_alarm
        if alarm is None or at < alarm:
            self._out.wake_at(at, reason)

    def _open(self, task: TaskRef, cut: int) -> OpenGroup:
        """Open a train group and take its places."""
        size, needs = self._policy.members(self._specs[task.env].group_size)
        group = self._new_group(task, size)
        group.needs = needs
        return self._admit(group, cut)

    def _open_kept(self, kept: do.PutOff, cut: int) -> OpenGroup:
        """The same for what was put off."""
        del self.kept[kept.number]
        group = self._new_group(kept.task, kept.size)
        group.put_off = kept
        group.references = kept.references
        if kept.group_seed is not None:
            group.seed = kept.group_seed
        self.curriculum.goes_on(kept.task.env)
        return self._admit(group, cut)

    def _admit(self, group: OpenGroup, cut: int) -> OpenGroup:
        group.step = cut + 1
        self._launchable[group.task.env].append(group)
        self.owing += 1
        group.places = group.needs
        self.pacing.taken += group.places
        self._policy.opened(group)
        if self._policy.has_order or self._repeats:
            self._note_opened(group)
        return group

    def _note_opened(self, group: OpenGroup) -> None:
        """Others may start before it: without a word of it, a life that goes on from the journal would take it for not
        drawn, and count one that was drawn later in its place."""
        needs = 0 if group.needs == group.size else group.needs
        put_off = 0 if group.put_off is None else group.put_off.number
        self._out.say(do.NoteOpened(group.id, group.task, group.size, group.seed, needs, put_off))

    def new_number(self) -> GroupId:
        """The id of a group to be opened."""
        number = self.next_group
        self.next_group += 1
        return number

    def _new_group(self, task: TaskRef, size: int) -> OpenGroup:
        number = self.new_number()
        return self._groups.open(number, task, size, mix(self._group_key, number) >> 1, self._out.seq)

    def _start(self, group: OpenGroup, engine: EngineState | None = None) -> Flight:
        engine = engine or self._fleet.place(group.engine)
        if engine is None and self._is_whole(group):
            engine = self._fleet.place_anyway()
        if engine is None:
            raise InvariantError(f"no engine has room for group {group.id}, but a permit was free")
        if group.retries:
            why = _AGAIN
        elif group.launched:
            why = _GOES_ON if engine.id == group.engine else _ELSEWHERE
        else:
            why = _OPENED
        if group.engine is None:
            group.engine = engine.id
        rollout = group.next_member()
        task = group.task
        account = self._account.of(task.split, task.env)
        self._account.launched(account)
        if task.split == "train":
            self.breakers.started(rollout, task.env)
        now = self._out.now
        flight = Flight(rollout, task, engine.id, now, account, now)
        engine.add(flight)
        self._flights.add(flight)
        if self._learner is not None:
            self._learner.started(engine, flight, self._out.now)
        noise = self.noise_of(rollout, group)
        put_off = 0 if group.put_off is None else group.put_off.number
        self._out.say(
            do.StartRollout(
                rollout,
                task,
                group.seed,
                noise,
                engine.id,
                engine.held,
                why,
                group_size=group.size,
                group_needs=0 if group.needs == group.size else group.needs,
                put_off=put_off,
            )
        )
        return flight


def _always(_env: EnvName) -> bool:
    return True
