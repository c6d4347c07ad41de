"""Rollouts alone on an engine that has a core of its own: the whole runtime without a trainer, and the simulation of it.

`FIT` is what an engine is calibrated by, `HELD_OUT` what is then told of it. The first were chosen for what they span, on simulated
engines whose constants are known, and before any error on a real one was seen: one sequence to 64 in a step, 60 to 3,000 tokens
of prompt, answers of 8 to 150, and contexts that grow over turns.
`siblings`, whose prompts are shared, came last, after loads to be told had shown that it was missing. The two have no load in
common, and no seed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from bench._agents import LONGEST, RULES, Agents, Shape, Watch, run_agents, setup_of, window
from bench.vllm_admission import KV_TOKENS, LIMITS, POLL_S, Server, make_model, serving, warm_up
from paceline.core.admission import FixedCap
from paceline.core.advantages import builtin
from paceline.core.scheduler import Core
from paceline.engines.embedded import EngineOptions, EngineProcess
from paceline.engines.http import connect
from paceline.sim.calibrate import Calibration
from paceline.sim.engine import EngineModel
from paceline.sim.requests import Record
from paceline.sim.simulation import Simulation
from paceline.testing.run import MemoryJournal

MOST_SEQS = 64
BATCHED = {"embedded": 512, "vllm": LONGEST}
"""Tokens of one step. `tools/vllm_serve.py` has no chunked prefill: a step holds any prompt whole."""
SKIPPED_S = 10.0
"""At the beginning of a load, of which its goodput does not tell."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is given."""

    shape: Shape
    tool_s: float
    cap: int
    seconds: float
    seed: int


FIT = {
    "few": Load(Shape(60, 1.0, 1.0, 120.0, 256), 0.0, 2, 25.0, 11),
    "many": Load(Shape(60, 1.0, 1.0, 20.0, 100), 0.0, 64, 25.0, 12),
    "wide": Load(Shape(60, 1.0, 1.0, 150.0, 256), 0.0, 32, 25.0, 13),
    "prompts": Load(Shape(600, 1.0, 1.0, 20.0, 100), 0.0, 12, 25.0, 14),
    "reading": Load(Shape(3000, 1.0, 1.0, 8.0, 30), 0.0, 1, 25.0, 15),
    "long": Load(Shape(2500, 1.0, 1.0, 120.0, 256), 0.0, 4, 25.0, 16),
    "turns": Load(Shape(300, 6.0, 150.0, 40.0, 200), 0.0, 6, 25.0, 17),
    "siblings": Load(Shape(500, 1.0, 1.0, 100.0, 256, shares_prompt=True), 0.0, 16, 25.0, 18),
}
_ANSWERS = Shape(100, 1.0, 1.0, 60.0, 256, shares_prompt=True)
HELD_OUT = {
    "answers": Load(_ANSWERS, 0.0, 16, 40.0, 7),
    "crowd": Load(_ANSWERS, 0.0, 48, 40.0, 7),
    "agents": Load(Shape(shares_prompt=True), 1.0, 8, 40.0, 7),
    "essays": Load(Shape(800, 1.0, 1.0, 250.0, 256, shares_prompt=True), 0.0, 6, 40.0, 7),
    "helpers": Load(Shape(200, 4.0, 60.0, 30.0, 128, shares_prompt=True), 0.5, 24, 40.0, 7),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """Loads on a real engine."""

    records: Sequence[Record]
    """The journals of those to fit to, one after the other."""
    cells: Mapping[str, Sequence[tuple[Load, Mapping[str, float]]]]
    """By name: each time that it ran, and what `window` says of it."""


def observed(engine: str) -> Observed:
    """All loads in turn, and all once more with other rollouts: those to fit to and those to be told alternate, so that what changes
    on a machine within minutes is not in one kind of them alone."""
    records: list[Record] = []
    cells: dict[str, list[tuple[Load, Mapping[str, float]]]] = {name: [] for name in FIT | HELD_OUT}
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[-1:])  # the server inherits it
        with _server(engine) as server:
            os.sched_setaffinity(0, cores[:-1] or cores)
            asyncio.run(warm_up(server))
            for more in (0, 100):
                for name, first in _in_turn().items():
                    load = replace(first, seed=first.seed + more)
                    journal, cell = asyncio.run(_observe(server, load))
                    cells[name].append((load, cell))
                    if name in FIT:
                        records += journal
    finally:
        os.sched_setaffinity(0, cores)
    return Observed(records, cells)


def _in_turn() -> dict[str, Load]:
    """One to fit to, one to be told, as long as there are both."""
    pairs = zip_longest(FIT.items(), HELD_OUT.items())
    return dict(named for pair in pairs for named in pair if named is not None)


@contextmanager
def _server(engine: str) -> Iterator[Server]:
    if engine == "vllm":
        with serving() as server:
            yield server
        return
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        make_model(Path(folder))
        process = EngineProcess.start(
            EngineOptions(
                model=folder, kv_tokens=KV_TOKENS, max_num_seqs=MOST_SEQS, max_batched_tokens=BATCHED[engine]
            )
        )
        try:
            yield Server(process.url, process.pid)
        finally:
            process.stop()


async def _observe(server: Server, load: Load) -> tuple[Sequence[Record], Mapping[str, float]]:
    engine = await connect(server.url, id="engine-0", served_name="policy", start_s=60.0, limits=LIMITS)
    journal = MemoryJournal()
    try:
        watch = await run_agents(
            engine,
            FixedCap(load.cap),
            environment=Agents(load.tool_s, load.seed, load.shape),
            seed=load.seed,
            seconds=load.seconds,
            cpu_s=server.cpu_s,
            poll_s=POLL_S,
            journal=journal,
        )
    finally:
        await engine.close()
    if watch.errors:
        raise RuntimeError(f"{len(watch.errors)} calls failed, the first: {watch.errors[0]}")
    return journal.entries, window(watch, SKIPPED_S, load.seconds)


def simulated(fitted: Calibration, engine: str, load: Load) -> float:
    """Goodput of a load on such an engine, in tokens a second."""
    speed = fitted.speed(
        kv_tokens=KV_TOKENS, max_model_len=LONGEST, max_num_seqs=MOST_SEQS, max_batched_tokens=BATCHED[engine]
    )
    watch = Watch()
    simulation = Simulation(
        Core(setup_of(load.seed), FixedCap(load.cap)),
        {"engine-0": EngineModel(speed)},
        {"agents": Agents(load.tool_s, load.seed, load.shape)},
        algorithm=builtin("grpo", {}),
        rules={"agents": RULES},
        folds=[watch],
    )
    simulation.run(until=SKIPPED_S)
    before = watch.sampled
    simulation.run(until=load.seconds)
    return (watch.sampled - before) / (load.seconds - SKIPPED_S)
