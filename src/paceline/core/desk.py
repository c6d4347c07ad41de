"""The run as a scheduling policy sees it, and the verbs by which it acts: the `Desk` of a real core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.core.accounting import Account
from paceline.core.batching import BatchList
from paceline.core.continuing import Continuing
from paceline.core.fleet import EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.launching import Launcher
from paceline.core.outbox import Outbox
from paceline.core.scheduling.lengths import EnvLengths
from paceline.core.setup import CoreSetup
from paceline.core.turns import Turns
from paceline.domain import commands as do
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.rollout import CancelCause
from paceline.domain.task import TaskRef


class CoreDesk:
    """The core's own parts go by it too, where they do what a policy may do. A `Desk`."""

    def __init__(
        self,
        setup: CoreSetup,
        fleet: Fleet,
        flights: Flights,
        groups: GroupLedger,
        batch_list: BatchList,
        account: Account,
        launcher: Launcher,
        turns: Turns,
        continuing: Continuing,
        out: Outbox,
    ) -> None:
        self.setup = setup
        self.fleet = fleet
        self.flights = flights
        self.groups = groups
        self.list = batch_list
        self.pacing = launcher.pacing
        self.cut = 0
        """Batches cut so far: the step being collected is the next one."""
        self.processing: dict[GroupId, OpenGroup] = {}
        """Train groups that have closed and are being processed."""
        self._account = account
        self._launcher = launcher
        self._turns = turns
        self._continuing = continuing
        self._out = out
        self._attempts = max(spec.max_attempts for spec in setup.train)

    def flights_of(self, group: OpenGroup) -> list[Flight]:
        """The flights of members that were started for a group, by member; some may have left it since."""
        attempts = self._attempts + max(group.excused.values(), default=0)
        return self.flights.of_group(group.id, group.launched, attempts)

    def process(self, group: OpenGroup, closed: ClosedGroup | None) -> None:
        """Have a group processed that has closed, if it has."""
        if closed is not None:
            self.processing[group.id] = group
            self._out.say(do.ProcessGroup(closed, "its last member has ended"))

    @property
    def kept(self) -> Mapping[int, do.PutOff]:
        return self._launcher.kept

    @property
    def owing(self) -> int:
        return self._launcher.owing

    @property
    def now(self) -> float:
        return self._out.now

    @property
    def measuring(self) -> bool:
        return self.flights.evals > 0 or bool(self._launcher.evals)

    @property
    def out_of_tasks(self) -> bool:
        return self._launcher.curriculum.exhausted

    def cancel(self, flight: Flight, cause: CancelCause, reason: str) -> None:
        self._continuing.before_cancelling(flight)
        self._turns.cancel(flight, cause, reason)

    def hold(self, flight: Flight, reason: str) -> None:
        # One that waits to go on after a restart holds nothing yet; it is held when it asks for its turn.
        if flight.cancelled is None and not flight.held and flight.engine:
            self._turns.hold(flight, reason)

    def note_late(self, flight: Flight, reason: str) -> None:
        flight.late = True
        self._out.say(do.NoteLate(flight.id, reason))

    def compare(self, group: OpenGroup, references: tuple[float, ...], reason: str) -> None:
        group.references = references
        self._out.say(do.NoteReferences(group.id, references, reason))

    def release(self, flight: Flight, engine: EngineState | None = None) -> None:
        if flight.held and flight.cancelled is None:
            self._turns.release(flight, engine)

    def discard(self, rollouts: Iterable[RolloutId], reason: str) -> None:
        for rollout in rollouts:
            entry = self.list.discard(rollout)
            self.pacing.taken -= 1
            trainable = sum(sample.trainable_tokens for sample in entry.samples)
            self._account.of("train", entry.env).move("queued", "discarded", trainable)
            self._out.say(do.NoteDiscarded(rollout, trainable, reason))

    def give_up(self, group: OpenGroup) -> None:
        if group.owes_launches:
            self._launcher.withdraw(group)
            self.process(group, self._launcher.give_up(group))

    def put_off(
        self,
        task: TaskRef,
        size: int,
        reason: str,
        *,
        group_seed: int | None = None,
        noise: tuple[int, ...] = (),
        again: tuple[RolloutId, ...] = (),
        references: tuple[float, ...] = (),
    ) -> None:
        self._launcher.put_offs = number = self._launcher.put_offs + 1
        self._launcher.put_off(do.PutOff(number, task, size, group_seed, noise, again, references, reason))

    def split(self, group: OpenGroup, flights: Sequence[Flight], reason: str) -> OpenGroup:
        rest, rollouts = self._launcher.new_number(), tuple([flight.id for flight in flights])
        self._out.say(do.SplitGroup(group.id, rest, rollouts, reason))
        self._launcher.curriculum.goes_on(group.task.env)
        self.process(group, self.groups.split(group.id, rest, rollouts))
        return self.groups[rest]

    def note_lengths(self, env: EnvName, lengths: EnvLengths) -> None:
        self._out.say(lengths.note(env))

    def give_place(self, group: OpenGroup) -> None:
        group.places -= 1
        self.pacing.taken -= 1

    def take_place(self, group: OpenGroup) -> None:
        group.places += 1
        self.pacing.taken += 1

    def move(self, flight: Flight, engine: EngineState) -> None:
        self._turns.move(flight, engine)

    def noise_of(self, rollout: RolloutId, group: OpenGroup) -> int:
        return self._launcher.noise_of(rollout, group)

    def may_start(self, env: EnvName) -> bool:
        return self._launcher.may_start(env)

    def start(self, group: OpenGroup, engine: EngineState) -> Flight:
        return self._launcher.start(group, engine)
