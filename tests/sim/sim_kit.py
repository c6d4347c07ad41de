"""Small simulations for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.core.admission import Admission, FixedCap
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.scheduling import Overlap, Scheduling
from paceline.core.setup import CoreSetup
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.journal.lines import line_of
from paceline.sim.engine import Endpoint, EngineModel, Speed
from paceline.sim.simulation import Simulation
from paceline.sim.workloads import PRESETS, Workload, workload_of
from paceline.sim.world import FaultModel, TrainerModel, WeightsModel
from paceline.testing import setup_for, train_env

SMALL = Speed(kv_tokens=60_000, max_model_len=40_000)
"""An 8B model's steps with a cache that is soon full."""

SEQ_LEN = 1 << 16


class Kept:
    """Every decision, in a list."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Event, tuple[Command, ...]]] = []

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        self.entries.append((at, event, tuple(commands)))


def as_bytes(entries: Sequence[tuple[float, Event, Sequence[Command]]]) -> bytes:
    """A journal as it is written."""
    return msgspec.msgpack.encode(
        [(at, line_of(e), [line_of(c) for c in commands]) for at, e, commands in entries]
    )


def small_setup(**changes: Any) -> CoreSetup:
    """A core's setup: groups of 4, batches of 16."""
    env = train_env(group_size=changes.pop("group_size", 4), max_attempts=changes.pop("max_attempts", 2))
    segment = changes.pop("segment_tokens", None)
    park = changes.pop("park", True)
    given = {"batch": 16, "max_steps": 4, "seq_len": SEQ_LEN, "dead_group_limit": 10**6} | changes
    return msgspec.structs.replace(setup_for(env, **given), segment_tokens=segment, park=park)


def simulation(
    preset: str = "code-single",
    *,
    of: CoreSetup | None = None,
    admission: Admission | None = None,
    scheduling: Scheduling | None = None,
    engines: int = 2,
    speed: Speed = SMALL,
    make: Callable[[Speed], Endpoint] = EngineModel,
    workload: Workload | None = None,
    train_s: float = 20.0,
    trainer: TrainerModel | None = None,
    weights: WeightsModel | None = None,
    faults: FaultModel | None = None,
    poll_s: float | None = None,
    scored_at_once: int | None = None,
    folds: Sequence[Any] = (),
    watch: Callable[..., None] | None = None,
    **changes: Any,
) -> Simulation:
    """One small simulation, not yet run."""
    chosen = of or small_setup(**changes)
    return Simulation(
        Core(chosen, admission or FixedCap(8), scheduling or Overlap()),
        {f"e{number}": make(speed) for number in range(engines)},
        {"env": workload or workload_of(PRESETS[preset], chosen.seed)},
        algorithm=builtin("grpo", {}),
        rules={"env": GroupRules(env="env", seq_len=SEQ_LEN)},
        trainer=trainer or TrainerModel(step_s=train_s),
        weights=weights or WeightsModel(load_s=2.0),
        faults=faults,
        poll_s=poll_s,
        scored_at_once={"env": scored_at_once} if scored_at_once else None,
        folds=folds,
        watch=watch,
    )
