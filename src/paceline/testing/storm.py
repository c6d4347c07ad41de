"""Random faults at random moments, kills of the orchestrator among them, over many lives of one run.

    python -m paceline.testing.storm --seeds 10000             # what `make chaos` runs
    python -m paceline.testing.storm --first 4711 --seeds 1    # one seed again

A seed is a run: its setup, its world (`script.chaos`), and its faults. Engines are lost and come back, memory runs
short, the run is stopped, the orchestrator is killed. A kill may lose the last records of the journal, but none that
the outside has seen. What is left is written as the log would hold it, folded (`core.recovery`), and the next life
goes on from there. After the last fault the run must finish. `Invariants` watches every decision of every life;
`check_records` then looks at the records of all lives together.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import Random
from typing import Any, NamedTuple

import msgspec

from paceline.config import EvalSection
from paceline.core.admission import AdaptiveCap, Admission, Bounds, FixedCap, PredictiveCap
from paceline.core.advantages import builtin
from paceline.core.parts import whole_parts
from paceline.core.quarantine import Patience
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.scheduling import Scheduling
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineLoad
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout
from paceline.errors import InvariantError
from paceline.journal.lines import Line, Restorer, line_of
from paceline.testing.invariants import Invariants
from paceline.testing.lives import Record, check_records
from paceline.testing.policies import POLICIES
from paceline.testing.script import chaos, setup_for, train_env
from paceline.testing.world import World

_LAST_EVENTS = 60_000
"""What a run may take to cut a batch, or to finish, after its last fault; more is a run that stands still."""
_IDLE_S = 1000
"""Seconds after which a run in which nothing happens stands still: longer than any pause before a probe."""
_SHORT = 100
"""Runs with fewer events before their last fault are short: what comes behind it is the same in every run."""
_MOST_STEPS, _MOST_STEPS_OF_SHORT = 60, 4
_ANY_LAG = ("overlap", "divided", "divided_ahead", "kv_area")
"""Policies that may run ahead as far as their config says."""


class Report(NamedTuple):
    """What happened to one seed."""

    seed: int
    events: int
    lives: int
    faults: int
    rollouts: int
    continued: int
    """Rollouts that went on with tokens of an earlier life, each time they did."""
    steps: int


class Storm:
    """One seed."""

    def __init__(self, seed: int, events: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.events = events
        setup = _setup(self.random, seed)
        most = _MOST_STEPS if events >= _SHORT else _MOST_STEPS_OF_SHORT
        self.setup = msgspec.structs.replace(setup, max_steps=min(setup.max_steps, most))
        self.script = chaos(seed, failures=self.random.choice((0.0, 0.2, 0.4)))
        self.engines = self.random.randint(1, 3)
        self.cap = self.random.randint(2, 10)
        self.kv_tokens = self.random.choice((None, 40, 200))
        self.controller = self.random.choice(("fixed", "fixed", "adaptive", "predictive"))
        self.policy = self.random.choice([*POLICIES, "overlap", "overlap", "overlap"])
        if self.policy not in _ANY_LAG:
            kind = POLICIES[self.policy]
            self.setup = msgspec.structs.replace(self.setup, lag=kind.lag, max_staleness=kind.max_staleness)
        # A group that is larger than the cap runs over it, and other policies stop members one by one.
        fits = self.controller == "fixed" and self.cap >= max(spec.group_size for spec in self.setup.train)
        if seed % 2 and fits and self.policy in ("overlap", "synchronous"):
            whole = frozenset([("train", spec.name) for spec in self.setup.train])
            self.setup = msgspec.structs.replace(self.setup, whole_groups=whole)
        self.records: list[Record] = []
        self.rollouts: dict[RolloutId, Rollout] = {}
        """The rollout store."""
        self.parts: dict[RolloutId, list[Part]] = {}
        """The partial store."""
        self.checkpoint: dict[str, Any] = EMPTY
        self.lives = self.faults = self.left = 0
        self.acknowledged = 0
        """Newest step that the trainer has acknowledged."""

    def run(self) -> Report:
        """All lives. InvariantError, or whatever the core raised, when something is wrong."""
        self.left = self.events
        world = self._life(None)
        while self.left > 0 and world.trace.finish is None:
            count = min(self.left, self.random.randint(1, max(2, self.events // 4)))
            self.left -= count
            before = len(world.trace.journal)
            world.run(events=count)
            if world.trace.finish is None and before < len(world.trace.journal):
                world = self._fault(world)
        while world.trace.finish is None or (world.trace.finish.status == "stopped" and self.left > 0):
            self.left -= 1
            if world.trace.finish is not None:  # it was stopped: go on
                world = self._kill(world, whole=True)
            before = world.core.cut
            self._to_the_end(world)
            if world.trace.finish is None and world.core.cut > before:
                # It goes on, but slowly: where deadlines are short and policies hold much, most rollouts bring nothing.
                world.shut_down("it has taken long enough")
                self._to_the_end(world)
            if world.trace.finish is None:
                raise InvariantError(f"it stands still at {world.now:.1f} s, in flight: {len(world.running)}")
        self._keep(world, len(world.trace.journal))
        check_records(self.records, world)
        starts = sum(isinstance(c, do.StartRollout) for r in self.records for c in r.commands)
        continued = sum(isinstance(r.event, on.RolloutContinued) and r.event.tokens > 0 for r in self.records)
        return Report(
            self.seed, len(self.records), self.lives, self.faults, starts, continued, world.core.cut
        )

    def _to_the_end(self, world: World) -> None:
        """No more faults. A controller that learns lets start what fits until the next reading of its engines' metrics,
        so there is one every second, as in a run."""
        if self.controller == "fixed":
            world.run(events=_LAST_EVENTS)
            return
        journal, idle_s = world.trace.journal, 0
        most = len(journal) + _LAST_EVENTS
        while world.trace.finish is None and idle_s < _IDLE_S and len(journal) < most:
            engines = world.core.fleet.engines()
            before = len(journal) + len(engines)
            for engine in engines:
                world.post(on.LoadReported(engine.id, EngineLoad(0, 0, 0.1, self.faults)))
            next_at = world.now + 1.0
            world.run(until=next_at)
            world.now = max(world.now, next_at)
            idle_s = 0 if len(journal) > before else idle_s + 1

    # ── lives ──

    def _life(self, recovery: Recovery | None) -> World:
        self.lives += 1
        trained = None
        if recovery is not None:
            owed = [s for s in recovery.state(self.rollouts, {})["shipping"]]
            newest = min([recovery.cut, *[step - 1 for step in owed]])
            trained = max(0, min(newest, self.acknowledged - self.random.randint(0, 2)))
        watch = Invariants()
        for record in self.records:
            watch.recall(record.event, record.commands)
        return World(
            self.setup,
            self.script,
            engines=self.engines,
            admission=self._admission(),
            scheduling=self._scheduling(),
            algorithm=builtin(POLICIES[self.policy].algorithm, {}),
            kv_tokens=self.kv_tokens,
            recovery=recovery,
            rollouts=self.rollouts,
            parts=self._left_of(recovery),
            replayable=("a",),
            trained=trained,
            first_seq=len(self.records),
            now=self.records[-1].at if self.records else 0.0,
            watch=watch,
        )

    def _left_of(self, recovery: Recovery | None) -> dict[RolloutId, tuple[Part, ...]]:
        left = [] if recovery is None else recovery.under_way
        return {
            each.id: whole_parts(self.parts.get(each.id, ()), each.requests, each.sampled) for each in left
        }

    def _admission(self) -> Admission:
        bounds = Bounds(floor=2, most=12, initial=self.cap, group=4)
        if self.controller == "fixed":
            return FixedCap(self.cap)
        return AdaptiveCap(bounds) if self.controller == "adaptive" else PredictiveCap(bounds)

    def _scheduling(self) -> Scheduling:
        return POLICIES[self.policy].make()

    # ── faults ──

    def _fault(self, world: World) -> World:
        self.faults += 1
        kind = self.random.random()
        if kind < 0.55:
            return self._kill(world)
        if kind < 0.75:
            usable = [e.id for e in world.core.fleet.engines() if e.out is None]
            if usable:
                world.lose(self.random.choice(usable))
        elif kind < 0.95:
            for engine in world.core.fleet.engines():
                usage = self.random.random() ** 0.5
                load = EngineLoad(len(world.running), int(4 * usage), usage, self.faults * int(usage > 0.9))
                world.post(on.LoadReported(engine.id, load if self.random.random() < 0.9 else None))
        else:
            world.shut_down()
        return world

    def _kill(self, world: World, *, whole: bool = False) -> World:
        journal = world.trace.journal
        durable = self._seen_outside(world)
        self._keep(world, len(journal) if whole else self.random.randint(durable, len(journal)))
        begin = self.checkpoint if self.random.random() < 0.7 else EMPTY
        recovery = Recovery(begin)
        for seq, at, event, commands in as_read(self.records):
            if seq >= begin["seq"]:
                recovery.apply(seq, at, event, commands)
        return self._life(recovery)

    def _seen_outside(self, world: World) -> int:
        """Records that a kill cannot lose: something outside has acted upon them."""
        journal, first = world.trace.journal, len(self.records)
        seen = max([state["seq"] - first for _, state in world.trace.checkpoints], default=0)
        shipped = {event.step for _, event, _ in journal if isinstance(event, on.BatchShipped)}
        for number, (_, _, commands) in enumerate(journal):
            if any(isinstance(c, do.ShipBatch) and c.batch.step in shipped for c in commands):
                seen = max(seen, number + 1)
        return seen

    def _keep(self, world: World, count: int) -> None:
        first = len(self.records)
        # Written apart from the journal: either may know of what the other has lost.
        parts = world.trace.parts
        written = len(parts) if self.random.random() < 0.5 else self.random.randint(0, len(parts))
        for part in parts[:written]:
            self.parts.setdefault(part.rollout, []).append(part)
        for at, event, commands in world.trace.journal[:count]:
            self.records.append(Record(at, event, tuple(commands)))
            if isinstance(event, on.RolloutEnded):
                self.rollouts[event.rollout.id] = event.rollout
        for _, event, _ in world.trace.journal:
            if isinstance(event, on.StepTrained):
                self.acknowledged = max(self.acknowledged, event.step)
        for _, state in world.trace.checkpoints:
            if state["seq"] <= first + count:
                self.checkpoint = state


def as_read(records: list[Record]) -> list[tuple[int, float, Event, tuple[Command, ...]]]:
    """Records as they come back from the log: without arrays."""
    encoder, decoder, restorer = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Line), Restorer()
    found = []
    for seq, (at, event, commands) in enumerate(records):
        line = decoder.decode(encoder.encode([seq, at, line_of(event), [line_of(c) for c in commands]]))
        restored = restorer.event(line.event)
        found.append((seq, at, restored, tuple([restorer.command(command) for command in line.commands])))
    return found


def _setup(random: Random, seed: int) -> CoreSetup:
    size = random.randint(2, 4)  # one alone has no spread of rewards, and never trains
    envs = [
        train_env(
            "a",
            tasks=random.choice((None, 7, 40)),
            epochs=random.choice((None, None, 2)),
            group_size=size,
            max_attempts=random.randint(1, 3),
            on_stale=random.choice(("drop", "mask_tokens", "train")),
            sampler=random.choice(("sequential", "shuffled")),
        )
    ]
    if envs[0].source.size is not None and random.random() < 0.5:
        envs[0] = msgspec.structs.replace(envs[0], patience=Patience(1, envs[0].source.size))
    if random.random() < 0.5:
        rate = random.choice((None, 90.0))
        envs.append(
            train_env("b", group_size=random.randint(2, 4), max_attempts=2, weight=2.0, tasks_per_minute=rate)
        )
        if random.random() < 0.5:
            envs.append(train_env("c", tasks=12, epochs=3, group_size=2, max_attempts=2, sampler="shuffled"))
    evals = [EvalSection(id="e", name="held", examples=2, k=2, every=3)] if random.random() < 0.4 else []
    by_tokens = random.random() < 0.4
    lag = random.randint(0, 3)
    setup = setup_for(
        *envs,
        batch=None if by_tokens else random.randint(4, 12),
        batch_tokens=random.randint(60, 200) if by_tokens else None,
        lag=lag,
        max_staleness=lag + random.randint(0, 3),
        max_steps=random.randint(3, _MOST_STEPS),
        evals=evals,
        seed=seed,
        dead_group_limit=10**9,
        checkpoint_every=random.randint(1, 6),
    )
    segment = random.choice((None, None, 2))
    mix_by = random.choice(("draws", "rollouts", "tokens")) if len(envs) > 1 else "draws"
    return msgspec.structs.replace(setup, engine_wait_s=1e9, segment_tokens=segment, mix_by=mix_by)


def run_seed(seed: int, events: int | None = None) -> Report:
    """One seed; `events` before the last fault, drawn from the seed when left out: most short, some long."""
    if events is None:
        events = int(40 * 75 ** Random(f"events {seed}").random())
    return Storm(seed, events).run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.testing.storm", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--events", type=int, help="events before the last fault; drawn from the seed by default"
    )
    parser.add_argument("--stop", action="store_true", help="end with the first seed that fails")
    args = parser.parse_args(argv)
    began, reports, failed = time.monotonic(), [], []
    for seed in range(args.first, args.first + args.seeds):
        try:
            reports.append(run_seed(seed, args.events))
        except Exception:
            failed.append(seed)
            traceback.print_exc()
            again = f" --events {args.events}" if args.events else ""
            print(
                f"seed {seed} failed; again: python -m paceline.testing.storm --first {seed} --seeds 1{again}",
                flush=True,
            )
            if args.stop:
                break
    total = {
        name: sum(getattr(r, name) for r in reports)
        for name in ("events", "lives", "faults", "rollouts", "continued", "steps")
    }
    print(
        f"{len(reports)} seeds passed, {len(failed)} failed {failed[:10] or ''} in {time.monotonic() - began:.0f} s: {total}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
