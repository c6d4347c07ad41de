"""Whole runs of the asyncio runtime on virtual time: the real driver and runner, a scripted world around them.

    run = run_driver(setup_for(seq_len=512), {"env": ScriptedEnv()}, max_seconds=1000)
    assert run.finish.status == "done"

The decisions are watched by `Invariants`. When the run has ended, no task, call or permit may be left, and no
exception may have been lost.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from paceline.config import BatchSection, Limits, SamplingSection
from paceline.core.admission import Admission, FixedCap
from paceline.core.advantages import Algorithm, builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.scheduling import Scheduling
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EngineId, EnvName, RolloutId, Version
from paceline.domain.rollout import Rollout
from paceline.envs.protocol import Environment
from paceline.errors import InvariantError
from paceline.ports import Engine
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.driver import Driver
from paceline.runtime.in_order import InOrder
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.loads import poll_load
from paceline.runtime.offload import Inline
from paceline.runtime.processor import EnvProcessing, GroupProcessor
from paceline.runtime.room import Room
from paceline.runtime.runner import RolloutRunner
from paceline.testing.engine import ScriptedEngine
from paceline.testing.invariants import Invariants
from paceline.testing.loop import run_virtual
from paceline.testing.tokens import byte_tokenizer
from paceline.testing.trainer import ScriptedTrainer
from paceline.tokens import Bridge


class MemoryJournal:
    """Keeps every decision in a list."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Event, tuple[Command, ...]]] = []

    def append(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        self.entries.append((at, event, tuple(commands)))

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class DriverRun:
    """A run that has ended, for assertions."""

    core: Core
    journal: MemoryJournal
    trainer: ScriptedTrainer
    engines: dict[EngineId, Any]
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    finish: do.FinishRun | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """What people are told of a run that is to repeat."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Every terminal record, in order."""
        return [event.rollout for _, event, _ in self.journal.entries if isinstance(event, on.RolloutEnded)]

    def commands(self, kind: type[Any]) -> list[tuple[float, Any]]:
        """Every command of a kind with its second."""
        return [(at, c) for at, _, commands in self.journal.entries for c in commands if isinstance(c, kind)]


class DrivenEngine(Engine, Protocol):
    """What a run is given: `ScriptedEngine`, `ModelledEngine`."""

    @property
    def version(self) -> Version: ...

    @property
    def running(self) -> int:
        """Requests under way."""
        ...

    async def revive(self) -> on.EngineJoined: ...


class Controls:
    """What `during` may do to a run under way."""

    def __init__(self, driver: Driver, inbox: Inbox) -> None:
        self._driver = driver
        self._inbox = inbox

    @property
    def core(self) -> Core:
        return self._driver.core

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something at a virtual time."""
        asyncio.get_running_loop().call_at(seconds, action)

    def post(self, event: Event) -> None:
        """Report an event."""
        self._inbox.post(event)

    def shut_down(self, why: str = "Ctrl-C") -> None:
        self.post(on.ShutdownRequested(why))

    def beside(self, name: str, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something for as long as the run lasts."""
        self._driver.beside(name, part)


def run_driver(
    setup: CoreSetup,
    environments: Mapping[EnvName, Environment],
    *,
    engines: Callable[[], Sequence[DrivenEngine]] | Sequence[DrivenEngine] | None = None,
    trainer: Callable[[], ScriptedTrainer] = ScriptedTrainer,
    cap: int = 4,
    admission: Admission | None = None,
    scheduling: Scheduling | None = None,
    limits: Limits | None = None,
    sampling: SamplingSection | None = None,
    algorithm: Algorithm | None = None,
    rules: Callable[[EnvName], GroupRules] | None = None,
    state: dict[str, Any] | None = None,
    poll_s: float = 0.0,
    journal: MemoryJournal | None = None,
    during: Callable[[Controls], None] | None = None,
    watch: bool = True,
    durable_first: bool = False,
    room: bool = False,
    max_seconds: float = 100_000.0,
) -> DriverRun:
    """Run to the end and check that it was a clean one. Raises what ended the run, if that was an error.

    `environments` by name serve the train and the eval sections of that name. `engines` and `trainer` may be made on
    the running loop. `during` is called before the first event. `poll_s` 0 reads no loads. `watch`: whether
    `Invariants` looks at every decision, which it cannot where it is told of them late (`durable_first`). `room`: a full
    disk holds the run, for ten minutes at most, instead of ending it. TimeoutError when the run is not over after `max_seconds`.
    """
    lost: list[str] = []

    async def main() -> DriverRun:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: lost.append(str(context.get("exception") or context["message"]))
        )
        chosen = admission or FixedCap(cap)
        core = Core(setup, chosen, scheduling)
        given = engines() if callable(engines) else engines or (ScriptedEngine(),)
        made: dict[EngineId, DrivenEngine] = {engine.info.id: engine for engine in given}
        run = DriverRun(core, journal or MemoryJournal(), trainer(), dict(made))
        if state is not None:
            core.restore(state, state["cut"])
        inbox = Inbox()
        gates = Gates(inbox)
        runner = RolloutRunner(
            _runtimes(setup, environments, limits or Limits(), sampling or SamplingSection(max_tokens=64)),
            made,
            gates,
            loop.time,
        )
        processing = {
            spec.name: EnvProcessing(
                rules(spec.name) if rules else GroupRules(env=spec.name, seq_len=setup.seq_len),
                algorithm or builtin("grpo", {}),
            )
            for spec in setup.train
        }
        processor = GroupProcessor(processing, Inline(), slice_s=inf)
        in_order = InOrder(processor, core, run.notes.append) if core.scheduling.repeats else None
        watched = [_Watched(setup, core, made, resumed=state is not None)]
        made_room = Room(
            post=inbox.post,
            tell=lambda _text: None,
            fail=lambda error: driver.fail(error),
            limit_s=600.0,
        )
        driver = Driver(
            core,
            inbox=inbox,
            gates=gates,
            runner=runner,
            engines=made,
            processor=in_order or processor,
            sink=run.trainer,
            policy=run.trainer,
            journal=run.journal,
            checkpoints=_Kept(run.checkpoints),
            packing=BatchSection(seq_len=setup.seq_len),
            offload=Inline(),
            revive=lambda engine: made[engine].revive(),
            slice_s=inf,
            folds=[*(watched if watch and not durable_first else ()), *((in_order,) if in_order else ())],
            durable_first=durable_first,
            room=made_room if room else None,
        )
        if poll_s:
            for engine in made.values():
                driver.beside(f"load poll of {engine.info.id}", _polling(engine, inbox, poll_s))
        if during is not None:
            during(Controls(driver, inbox))
        opened = on.RunOpened("test", setup.seed, None if state is None else state["cut"])
        joined = [on.EngineJoined(engine.info, engine.version) for engine in made.values()]
        try:
            async with asyncio.timeout(max_seconds):
                run.finish = await driver.run(opened, joined)
        finally:
            run.seconds = loop.time()
            made_room.close()
            await asyncio.sleep(0)
            _check_clean(runner, made)
        return run

    run = run_virtual(main())
    gc.collect()  # an exception that nobody fetched is reported when its future goes
    if lost:
        raise InvariantError(f"exceptions were lost: {'; '.join(lost)}")
    return run


def _runtimes(
    setup: CoreSetup, environments: Mapping[EnvName, Environment], limits: Limits, sampling: SamplingSection
) -> dict[tuple[Any, EnvName], EnvRuntime]:
    bridge = Bridge(byte_tokenizer())
    names = [("train", spec.name) for spec in setup.train] + [
        ("eval", section.label) for section in setup.evals
    ]
    return {
        (split, name): EnvRuntime(
            environment=environments[name],
            source=environments[name].tasks("train" if split == "train" else "eval"),
            limits=limits,
            sampling=sampling,
            bridge=bridge,
        )
        for split, name in names
    }


def _polling(engine: Engine, inbox: Inbox, interval_s: float) -> Callable[[], Coroutine[Any, Any, None]]:
    async def poll() -> None:
        await poll_load(engine, inbox.post, interval_s=interval_s)

    return poll


def _check_clean(runner: RolloutRunner, engines: Mapping[EngineId, DrivenEngine]) -> None:
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    calls = {engine.info.id: engine.running for engine in engines.values() if engine.running}
    if left or calls or runner.running:
        raise InvariantError(
            f"the run has ended, but tasks {left}, calls {calls}, {runner.running} rollouts are left"
        )


class _Kept:
    """Checkpoints in a list."""

    def __init__(self, kept: list[tuple[int, dict[str, Any]]]) -> None:
        self._kept = kept

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._kept.append((step, state))


class _Watched:
    """A fold that shows each decision to `Invariants`, as a `World` does."""

    def __init__(
        self, setup: CoreSetup, core: Core, engines: Mapping[EngineId, DrivenEngine], *, resumed: bool
    ) -> None:
        self.setup = setup
        self.core = core
        self.admission = core._admission
        self.resumed = resumed
        self.running: dict[RolloutId, None] = {}
        self.lost: set[EngineId] = set()
        self._engines = engines
        self._invariants = Invariants()

    @property
    def held(self) -> dict[EngineId, Version]:
        return {engine.info.id: engine.version for engine in self._engines.values()}

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.RolloutEnded):
            self.running.pop(event.rollout.id, None)
        for command in commands:
            if isinstance(command, do.StartRollout):
                self.running[command.rollout] = None
        self._invariants(self, event, commands)
