"""What a scheduling policy is: the questions that the core asks it, and what it may have done.

`docs/scheduling.md` says what each policy answers. Pure, like the rest of the core: a policy has no clock, and acts only
through the verbs of its `Desk`. What it does not want to hear of costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from paceline.core.batching import BatchList
from paceline.core.fleet import EngineState, Fleet
from paceline.core.flights import Flight, Flights
from paceline.core.groups import GroupLedger, OpenGroup
from paceline.core.pacing import Pacing
from paceline.core.scheduling.lengths import EnvLengths
from paceline.core.setup import CoreSetup
from paceline.core.staleness import lead
from paceline.domain.commands import PutOff
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import CancelCause, Rollout
from paceline.domain.task import TaskRef


class Desk(Protocol):
    """The run as a policy sees it, and the verbs by which it acts. Only the verbs change anything."""

    @property
    def setup(self) -> CoreSetup: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def flights(self) -> Flights: ...
    @property
    def groups(self) -> GroupLedger: ...
    @property
    def pacing(self) -> Pacing: ...
    @property
    def list(self) -> BatchList: ...
    @property
    def processing(self) -> Mapping[GroupId, OpenGroup]:
        """Train groups that have closed and wait for their verdicts."""
        ...

    @property
    def kept(self) -> Mapping[int, PutOff]:
        """What was put off and has not been opened, oldest first."""
        ...

    @property
    def cut(self) -> int:
        """Batches cut so far."""
        ...

    @property
    def owing(self) -> int:
        """Open train groups with members to start."""
        ...

    @property
    def now(self) -> float: ...

    @property
    def measuring(self) -> bool:
        """Whether evals run, or wait to."""
        ...

    @property
    def out_of_tasks(self) -> bool:
        """Whether the curriculum has nothing left to draw."""
        ...

    def flights_of(self, group: OpenGroup) -> Sequence[Flight]:
        """The flights of members that were started for a group, by member; some may have left it since."""
        ...

    def cancel(self, flight: Flight, cause: CancelCause, reason: str) -> None:
        """Stop a rollout. One that is being stopped already is left alone."""
        ...

    def hold(self, flight: Flight, reason: str) -> None:
        """Take a rollout off its engine until it is released: it keeps its tokens and gives its permit back."""
        ...

    def note_late(self, flight: Flight, reason: str) -> None:
        """A rollout is late from now on (`Flight.late`), in this life of the run and in those to come."""
        ...

    def compare(self, group: OpenGroup, references: tuple[float, ...], reason: str) -> None:
        """The members of a group are compared with these rewards instead of each other."""
        ...

    def release(self, flight: Flight, engine: EngineState | None = None) -> None:
        """Let one that is held go on, on `engine` or where it was: at once if there is a permit, else when there is."""
        ...

    def discard(self, rollouts: Iterable[RolloutId], reason: str) -> None:
        """Throw finished rollouts away that wait in the batch list."""
        ...

    def give_up(self, group: OpenGroup) -> None:
        """Members of a group that have not started never will."""
        ...

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
        """Keep rollouts of a task for a group of their own, later."""
        ...

    def split(self, group: OpenGroup, flights: Sequence[Flight], reason: str) -> OpenGroup:
        """Rollouts that are held leave their group for one of their own, which is returned, so that it can close
        without them."""
        ...

    def note_lengths(self, env: EnvName, lengths: EnvLengths) -> None:
        """Tell the journal what was learnt of an environment's lengths, and how predictions did."""
        ...

    def noise_of(self, rollout: RolloutId, group: OpenGroup) -> int:
        """The noise seed of a member."""
        ...

    def may_start(self, env: EnvName) -> bool:
        """Whether its start rate lets a rollout of this environment start now."""
        ...

    def give_place(self, group: OpenGroup) -> None:
        """A member of the group will not end in this round: another rollout may have its place."""
        ...

    def take_place(self, group: OpenGroup) -> None:
        """It goes on, and takes a place again."""
        ...

    def move(self, flight: Flight, engine: EngineState) -> None:
        """Place a rollout that makes no call on another engine."""
        ...

    def start(self, group: OpenGroup, engine: EngineState) -> Flight:
        """Start the next member of an open group there; for policies with an order."""
        ...


class Scheduling:
    """One policy. What is not overridden is what `overlap` does."""

    has_rounds = False
    """Whether it wants `advance` before anything is cut or started, and `batch_cut`."""
    hears_turns = False
    """Whether it sets budgets of engine requests, and wants to hear when a rollout asks for one."""
    hears_endings = False
    """Whether it wants to hear of rollouts that end and groups that were processed."""
    has_order = False
    """Whether it decides which rollout starts or goes on first, and where."""
    cuts_whole = False
    """Whether a batch takes all that waits, rather than its size."""
    repeats = False
    """Whether no decision may depend on the clock: groups open as soon as they have places, whether there are permits or not, and a
    batch may have waited for evals to end."""

    desk: Desk

    def attach(self, desk: Desk) -> None:
        """Called once, before anything else."""
        self.desk = desk

    # ── starts ──

    def places(self) -> int:
        """Places for rollouts of fresh groups, now; may be negative."""
        desk = self.desk
        return desk.pacing.free(desk.cut, desk.fleet.held)

    def next_put_off(self) -> PutOff | None:
        """What was put off and is to be opened instead of a fresh group; one of `desk.kept`."""
        return None

    def may_draw(self) -> bool:
        """Whether a fresh task may be opened, when `next_put_off` has nothing."""
        return True

    def may_start(self) -> bool:
        """Whether members of open groups may start now."""
        return True

    def opened(self, group: OpenGroup) -> None:
        """A train group has been opened; its members are still to start."""

    def members(self, group_size: int) -> tuple[int, int]:
        """Of a fresh group: members to start, and how many of them make it whole."""
        return group_size, group_size

    def seat_next(self) -> bool:
        """`has_order`: let the rollout go on, or the group's next member start, that comes first, if an engine has room;
        whether one did."""
        return False

    @property
    def most(self) -> int:
        """Rollouts that may hold a place at once, at most: evals may take what permits that leaves."""
        return self.desk.pacing.most

    # ── batches ──

    def may_cut(self, step: int, held: Version) -> bool:
        """Whether batch `step` may be cut, if it is full."""
        return self.desk.pacing.may_cut(step, held)

    def batch_cut(self) -> None:
        """A batch has been cut and sent off; `desk.cut` counts it."""

    def advance(self) -> None:
        """Something has changed that may let something start: begin a round, if it is time."""

    # ── what it is told ──

    def budget(self, flight: Flight) -> int | None:
        """Tokens that the request which is granted now may sample; None sets no limit."""
        return self.desk.setup.segment_tokens

    def turn_asked(self, flight: Flight) -> None:
        """A rollout wants an engine request, the next of a turn that was cut or of a new one: it may be held or
        cancelled now, before it goes to the gate."""

    def owes_again(self, group: OpenGroup) -> None:
        """An attempt at a member has failed, and the member is about to be in line again."""

    def left(self, flight: Flight) -> None:
        """A train rollout has stopped, whatever becomes of its member; for policies with an order."""

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        """A train rollout that is its member's last attempt has ended; `group` has taken it in and may be closed."""

    def group_processed(self, group: OpenGroup, result: GroupResult) -> None:
        """Verdicts are in, and what may train waits in the list."""

    # ── resuming ──

    def snapshot(self) -> dict[str, Any]:
        """What `restore` takes back; msgpack-able. What was put off is kept by the core."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot; one of another policy is ignored. Called before the first event."""


class Rounds(Scheduling):
    """Policies that generate for one step at a time: a round begins when all engines hold the version that the step
    trains, and ends with the cut."""

    has_rounds = True

    def __init__(self) -> None:
        self.round = 0
        """Step of the round that has begun."""

    @property
    def is_open(self) -> bool:
        """Whether the round of the step being collected has begun."""
        return self.round == self.desk.cut + 1

    @property
    def batch(self) -> int:
        """Rollouts of a batch."""
        return self.desk.pacing.per_batch

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs, waits for its verdict, or waits to be started."""
        desk = self.desk
        return not desk.flights.trains and not desk.processing and not desk.owing

    def may_start(self) -> bool:
        return self.is_open

    def places(self) -> int:
        return self.batch - self.desk.pacing.taken if self.is_open else 0

    def may_cut(self, step: int, held: Version) -> bool:
        return lead(step, held) <= 0

    def advance(self) -> None:
        desk = self.desk
        if not self.is_open and desk.cut < desk.setup.max_steps and lead(desk.cut + 1, desk.fleet.held) <= 0:
            self.round = desk.cut + 1
            self.open_round()

    def open_round(self) -> None:
        """A round begins."""
