"""What holds after every decision, whatever the world does: give it to a `World` as `watch`.

    World(setup, chaos(seed=7), watch=Invariants()).run()

It keeps its own books, from the commands and events alone, and compares them with the core's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from paceline.core.admission import Admission
from paceline.core.fleet import EngineState
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.core.staleness import staleness, trained_by
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EngineId, GroupId, RolloutId, Version
from paceline.domain.task import Split
from paceline.errors import InvariantError


class Watched(Protocol):
    """What is looked at: a `World`, or a run of the driver."""

    @property
    def setup(self) -> CoreSetup: ...
    @property
    def core(self) -> Core: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def running(self) -> Mapping[RolloutId, object]:
        """What really runs, whatever the core believes."""
        ...

    @property
    def held(self) -> Mapping[EngineId, Version]:
        """What each engine really samples with."""
        ...

    @property
    def lost(self) -> Set[EngineId]: ...


class Invariants:
    """Raises InvariantError, naming the first rule that a decision broke."""

    def __init__(self) -> None:
        self._launched: Counter[tuple[Split, str]] = Counter()
        self._sampled: Counter[tuple[Split, str]] = Counter()
        self._ended: set[RolloutId] = set()
        self._streams: dict[GroupId, tuple[Split, str]] = {}
        self._processed: set[GroupId] = set()
        self._forgotten: set[GroupId] = set()
        self._shipped: set[RolloutId] = set()
        self._earlier: set[RolloutId] = set()
        """Ended in earlier lives of the run, or with them."""
        self._continued: dict[RolloutId, bool] = {}
        """Rollouts of earlier lives that go on in this one, and whether they have come to the end of their records."""
        self._thrown: set[RolloutId] = set()
        self._asked: set[RolloutId] = set()
        self._calls: dict[RolloutId, str] = {}
        self._cancelled: set[RolloutId] = set()
        self._parked: set[RolloutId] = set()
        self._moved: dict[tuple[GroupId, int], GroupId] = {}
        self._kept: dict[int, do.PutOff] = {}
        self._loading: set[str] = set()
        self._step: int | None = None
        self._lost_any = False

    def recall(self, event: Event, commands: Sequence[Command]) -> None:
        """A record of an earlier life of the run, before the first of this one."""
        if isinstance(event, on.RolloutEnded):
            self._earlier.add(event.rollout.id)
        for command in commands:
            if isinstance(command, do.StartRollout):
                self._streams[command.rollout.group] = (command.task.split, command.task.env)
            elif isinstance(command, do.SplitGroup):
                self._moved.update({rollout[:2]: command.rest for rollout in command.rollouts})
            elif isinstance(command, do.PutOff):
                self._kept[command.number] = command
            elif isinstance(command, do.ShipBatch):
                self._shipped.update(command.batch.rollouts)
                self._step = command.batch.step

    def __call__(self, world: Watched, event: Event, commands: Sequence[Command]) -> None:
        self._note_event(event)
        for command in commands:
            self._note_command(world, command)
        self._compare(world, commands)
        for command in commands[:-1]:
            # What a record says behind it, neither its state has nor the records that recovery reads after it.
            self._rule(
                not isinstance(command, do.SaveCheckpoint), "saved before its record was done", commands[-1]
            )
        if any(isinstance(command, do.FinishRun) for command in commands):
            self._at_the_end(world, commands)

    def _rule(self, holds: bool, text: str, *facts: Any) -> None:
        if not holds:
            raise InvariantError(f"{text}: {', '.join(map(str, facts))}")

    # ── our own books ──

    def _note_event(self, event: Event) -> None:
        if isinstance(event, on.RolloutEnded):
            rollout = event.rollout.id
            self._rule(rollout not in self._ended, "a rollout ended twice", rollout)
            earlier = event.rollout.outcome.cause == "restart" or rollout in self._continued
            (self._earlier if earlier else self._ended).add(rollout)
            self._asked.discard(rollout)
        elif isinstance(event, on.RolloutContinued):
            came = self._continued.get(event.rollout)
            self._rule(came is False, "it came to the end of its record, but was not to go on", event.rollout)
            self._continued[event.rollout] = True
        elif isinstance(event, on.TurnRequested):
            came = self._continued.get(event.rollout, True)
            self._rule(came, "a rollout asked for a turn before the end of its record", event.rollout)
            self._asked.add(event.rollout)
        elif isinstance(event, on.SegmentEnded):
            self._calls.pop(event.rollout)
            self._sampled[self._streams[event.rollout.group]] += sum(n for _, n in event.versions)
        elif isinstance(event, on.WeightsLoaded):
            self._loading.discard(event.engine)
        elif isinstance(event, on.EngineLost):
            self._lost_any = True

    def _note_command(self, world: Watched, command: Command) -> None:
        if isinstance(command, do.StartRollout):
            self._start(command)
        elif isinstance(command, do.ContinueRollout):
            rollout = command.rollout
            self._rule(rollout not in self._continued, "a rollout went on twice", rollout)
            self._rule(
                rollout not in self._ended | self._earlier, "it went on although it had ended", rollout
            )
            self._continued[rollout] = False
        elif isinstance(command, do.GrantTurn):
            self._grant(world, command)
        elif isinstance(command, do.CancelRollout):
            self._rule(command.rollout not in self._cancelled, "cancelled twice", command.rollout)
            self._cancelled.add(command.rollout)
        elif isinstance(command, do.ParkRollout):
            self._rule(command.rollout not in self._parked, "parked twice", command.rollout)
            self._rule(command.rollout not in self._cancelled, "parked after a cancel", command.rollout)
            self._parked.add(command.rollout)
        elif isinstance(command, do.ResumeRollout):
            self._rule(command.rollout in self._parked, "resumed without being parked", command.rollout)
            self._parked.discard(command.rollout)
        elif isinstance(command, do.UpdateWeights):
            self._rule(command.engine not in self._loading, "two updates of one engine", command.engine)
            unstopped = [r for r, e in self._calls.items() if e == command.engine and r in self._cancelled]
            self._rule(not unstopped, "an update before cancelled calls have stopped", *unstopped)
            self._loading.add(command.engine)
        elif isinstance(command, do.ProcessGroup):
            self._close(command.group)
        elif isinstance(command, do.ForgetGroup):
            self._rule(command.group not in self._forgotten, "a group was forgotten twice", command.group)
            self._forgotten.add(command.group)
        elif isinstance(command, do.ShipBatch):
            self._ship(world, command.batch)
        elif isinstance(command, do.SplitGroup):
            self._moved.update({rollout[:2]: command.rest for rollout in command.rollouts})
            self._streams[command.rest] = self._streams[command.group]
        elif isinstance(command, do.PutOff):
            self._rule(command.number not in self._kept, "put off twice", command.number)
            self._kept[command.number] = command
        elif isinstance(command, do.NoteDiscarded):
            self._rule(command.rollout not in self._shipped, "shipped and thrown away", command.rollout)
            self._thrown.add(command.rollout)

    def _start(self, command: do.StartRollout) -> None:
        rollout, stream = command.rollout, (command.task.split, command.task.env)
        self._launched[stream] += 1
        self._streams[rollout.group] = stream
        self._rule(rollout not in self._ended, "a rollout started twice", rollout)
        group = self._moved.get(rollout[:2], rollout.group)
        self._rule(group not in self._processed, "a member started after its group closed", rollout)
        if rollout.attempt:
            before = rollout._replace(attempt=rollout.attempt - 1)
            over = before in self._ended or before in self._earlier
            self._rule(over, "a retry began before the attempt had ended", rollout)
        if command.put_off:
            kept = self._kept.get(command.put_off)
            if kept is None:
                return  # put off in an earlier life
            pinned = not kept.noise or kept.noise[rollout.member] == command.noise_seed
            self._rule(pinned, "a response that was put off came back with other noise", rollout)
            seeded = kept.group_seed is None or kept.group_seed == command.group_seed
            self._rule(seeded, "and from another initial state", rollout)

    def _grant(self, world: Watched, command: do.GrantTurn) -> None:
        rollout, engine = command.rollout, command.engine
        self._rule(rollout in self._asked, "a turn was granted that nobody asked for", rollout)
        self._asked.discard(rollout)
        self._rule(rollout not in self._cancelled, "a cancelled rollout was granted a turn", rollout)
        self._rule(rollout not in self._parked, "a parked rollout was granted a turn", rollout)
        self._rule(engine not in self._loading, "a turn was granted on an engine that loads", rollout, engine)
        self._rule(engine not in world.lost, "a turn was granted on a lost engine", rollout, engine)
        held = world.held[engine]
        self._rule(command.version == held, "a turn names a version not held", command.version, held)
        self._calls[rollout] = engine

    def _close(self, group: ClosedGroup) -> None:
        self._rule(group.id not in self._processed, "a group closed twice", group.id)
        self._processed.add(group.id)
        members = [rollout.id.member for rollout in group.rollouts]
        self._rule(
            len(set(members)) == len(members) <= group.size, "a member settled twice", group.id, members
        )

    def _ship(self, world: Watched, batch: Batch) -> None:
        setup = world.setup
        self._rule(self._step is None or batch.step == self._step + 1, "a step was left out", batch.step)
        self._step = batch.step
        twice = self._shipped.intersection(batch.rollouts)
        self._rule(not twice and len(set(batch.rollouts)) == len(batch.rollouts), "shipped twice", *twice)
        back = self._thrown.intersection(batch.rollouts)
        self._rule(not back, "shipped although it was thrown away", *back)
        self._shipped.update(batch.rollouts)
        self._rule(len({s.rollout for s in batch.samples}) == len(batch.rollouts), "samples were split off")
        rules = {spec.name: spec.on_stale for spec in setup.train}
        for sample in batch.samples:
            newest = max(version for version, _ in sample.versions)
            self._rule(newest <= trained_by(batch.step), "trained before its weights", newest, batch.step)
            late = staleness(sample.oldest_version, batch.step)
            self._rule(
                late <= setup.max_staleness or rules[sample.env] == "train",
                "beyond the bound",
                sample.rollout,
                late,
            )

    # ── compared with the core's ──

    def _compare(self, world: Watched, commands: Sequence[Command]) -> None:
        core = world.core
        core.account.check()
        flights = {flight.id for flight in core.flights.all()}
        self._rule(flights == set(world.running), "in flight is not what runs", flights ^ set(world.running))
        for stream, account in core.account.streams().items():
            if world.resumed:
                break  # it goes on from an earlier life's books
            self._rule(account.launched == self._launched[stream], "launched", stream, account.launched)
            self._rule(account.sampled == self._sampled[stream], "sampled", stream, account.sampled)
        usable = [engine for engine in core.fleet.engines() if engine.usable]
        free = sum(max(0, world.admission.room(engine.id, engine.active)) for engine in usable)
        if core.fleet.stopped:
            begun = [c for c in commands if isinstance(c, do.StartRollout | do.GrantTurn)]
            self._rule(not begun, "begun although the run is held", begun)
        now = 0 if core.fleet.stopped else free
        self._rule(core.fleet.free() == now, "permits that are free", core.fleet.free(), now)
        roomiest = max(usable, key=lambda e: world.admission.room(e.id, e.active), default=None)
        self._rule(
            core.fleet.place(None) is (roomiest if free else None), "the engine with most room", roomiest
        )
        counted = Counter(flight.engine for flight in core.flights.all() if not flight.parked)
        for engine in core.fleet.engines():
            self._rule(engine.active == counted[engine.id], "permits of an engine", engine.id, engine.active)
            self._sums(engine)
        starts = [c for c in commands if isinstance(c, do.StartRollout | do.ContinueRollout)]
        started = {command.engine for command in starts if command.engine}
        for name in started:
            self._rule(
                counted[name] <= world.admission.cap(name), "an engine is over its cap", name, counted[name]
            )
        # Also without a word of the shell: one whose calls fail in a row is taken out by the core itself.
        self._lost_any = self._lost_any or any(engine.out is not None for engine in core.fleet.engines())
        if not self._lost_any and not world.admission.learns:
            # Parked ones hold no permit, and those of an earlier life no place.
            placed = sum(flight.engine != "" and not flight.parked for flight in core.flights.all())
            self._rule(placed <= core.fleet.cap(), "over the cap", placed, core.fleet.cap())
        if (mix := core.curriculum.mix) is not None:
            groups = [*core.groups.groups(), *core.processing.values()]
            under_way = Counter(group.task.env for group in groups if group.task.split == "train")
            for env in core.curriculum.samplers:
                self._rule(mix.under_way(env) == under_way[env], "groups that the mix counts on", env)
        if core.finished:
            return  # the list was emptied: what it held is left over
        places = sum(group.places for group in core.groups.groups())
        places += sum(group.places for group in core.processing.values()) + len(core.list)
        self._rule(places == core.pacing.taken, "places", places, core.pacing.taken)

    def _sums(self, engine: EngineState) -> None:
        """What the core adds up of an engine, added up anew."""
        flights = engine.flights.values()
        working = sum(f.context for f in flights if not f.parked)
        self._rule(engine.working_tokens == working, "working set", engine.id, engine.working_tokens, working)
        self._rule(engine.parked == sum(f.parked for f in flights), "parked", engine.id, engine.parked)
        calls = sum(name == engine.id for name in self._calls.values())
        self._rule(engine.calls == calls, "calls under way", engine.id, engine.calls, calls)
        self._rule(engine.calling_tokens >= 0, "tokens of calls", engine.id, engine.calling_tokens)

    def _at_the_end(self, world: Watched, commands: Sequence[Command]) -> None:
        core = world.core
        self._rule(isinstance(commands[-1], do.FinishRun), "a command after the last")
        self._rule(not world.running and not len(core.groups) and not core.processing, "something is owed")
        for stream, account in core.account.streams().items():
            for places in (account.tokens, account.rollouts):
                open_places = {p: n for p, n in places.items() if p in ("in_flight", "grouped") and n}
                self._rule(not open_places, "left in the account", stream, open_places)
        launched = sum(self._launched.values())
        self._rule(launched == len(self._ended), "launched and ended", launched, len(self._ended))
