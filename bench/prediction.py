"""How well a simulation on fitted engines tells what they do under loads that they were not fitted to.

Rollouts alone: the whole runtime without a trainer, and the engine on a core of its own. Each load is run on the real engine;
then each is simulated on the engine model that `paceline calibrate` makes of the journals of the two others, with the same
rollouts. What was measured, and what comes of it, is in docs/benchmarks/prediction.md.

    make bench ONLY=prediction                     the rows, and the tables; a quarter of an hour
    python -m bench.prediction --engine embedded   one table
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._agents import LONGEST, RULES, Agents, Shape, Watch, run_agents, setup_of, window
from bench.vllm_admission import KV_TOKENS, LIMITS, POLL_S, VLLM, Server, make_model, serving, warm_up
from paceline.core.admission import FixedCap
from paceline.core.advantages import builtin
from paceline.core.scheduler import Core
from paceline.engines.embedded import EngineOptions, EngineProcess
from paceline.engines.http import connect
from paceline.sim.calibrate import Calibration, calibrate
from paceline.sim.engine import EngineModel
from paceline.sim.requests import Record
from paceline.sim.simulation import Simulation
from paceline.testing.run import MemoryJournal

ONLY_BY_NAME = (
    "it takes a quarter of an hour, a quiet machine with two cores, and a real vLLM (make vllm-env)"
)
ENGINES = ("embedded", "vllm")
ROWS = tuple(f"prediction_{engine}" for engine in ENGINES)
MOST_SEQS, BATCHED = 64, 512
"""Of the embedded engine, and of `tools/vllm_serve.py`, whose steps hold more tokens than these loads have."""
SEED = 7
WINDOW = 10.0, 90.0
"""From when on the goodput of a load counts, and until when, in seconds."""
TARGET = 0.10


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is given."""

    shape: Shape
    tool_s: float
    cap: int


ANSWERS = Shape(100, 1.0, 1.0, 60.0, 400, shares_prompt=True)
LOADS = {
    "answers": Load(ANSWERS, 0.0, 16),
    "crowd": Load(ANSWERS, 0.0, 48),
    "agents": Load(Shape(shares_prompt=True), 1.0, 8),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    load: str
    real: float
    """Tokens a second."""
    predicted: float
    fitted: Calibration
    """To the other loads."""
    cell: Mapping[str, float]
    """What else was seen of the real one."""

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1


def predictions(engine: str, seconds: float) -> list[Prediction]:
    """Every load, each predicted from the others."""
    seen = observed(engine, seconds)
    found = []
    for name, (_, cell) in seen.items():
        others = [record for other, (records, _) in seen.items() if other != name for record in records]
        fitted = calibrate(others)
        found.append(Prediction(name, cell["goodput"], simulated(fitted, LOADS[name], seconds), fitted, cell))
    return found


def observed(engine: str, seconds: float) -> dict[str, tuple[Sequence[Record], dict[str, float]]]:
    """The journal of each load on the real engine, and its numbers."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[-1:])  # the server inherits it
        with _server(engine) as server:
            os.sched_setaffinity(0, cores[:-1] or cores)
            asyncio.run(warm_up(server))
            return {name: asyncio.run(_observe(server, load, seconds)) for name, load in LOADS.items()}
    finally:
        os.sched_setaffinity(0, cores)


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
                model=folder, kv_tokens=KV_TOKENS, max_num_seqs=MOST_SEQS, max_batched_tokens=BATCHED
            )
        )
        try:
            yield Server(process.url, process.pid)
        finally:
            process.stop()


async def _observe(server: Server, load: Load, seconds: float) -> tuple[Sequence[Record], dict[str, float]]:
    engine = await connect(server.url, id="engine-0", served_name="policy", start_s=60.0, limits=LIMITS)
    journal = MemoryJournal()
    try:
        watch = await run_agents(
            engine,
            FixedCap(load.cap),
            environment=Agents(load.tool_s, SEED, load.shape),
            seed=SEED,
            seconds=seconds,
            cpu_s=server.cpu_s,
            poll_s=POLL_S,
            journal=journal,
        )
    finally:
        await engine.close()
    if watch.errors:
        raise RuntimeError(f"{len(watch.errors)} calls failed, the first: {watch.errors[0]}")
    return journal.entries, window(watch, WINDOW[0], seconds)


def simulated(fitted: Calibration, load: Load, seconds: float) -> float:
    """Goodput of a load on such an engine, in tokens a second."""
    speed = fitted.speed(
        kv_tokens=KV_TOKENS, max_model_len=LONGEST, max_num_seqs=MOST_SEQS, max_batched_tokens=BATCHED
    )
    watch = Watch()
    simulation = Simulation(
        Core(setup_of(SEED), FixedCap(load.cap)),
        {"engine-0": EngineModel(speed)},
        {"agents": Agents(load.tool_s, SEED, load.shape)},
        algorithm=builtin("grpo", {}),
        rules={"agents": RULES},
        folds=[watch],
    )
    simulation.run(until=WINDOW[0])
    before = watch.sampled
    simulation.run(until=seconds)
    return (watch.sampled - before) / (seconds - WINDOW[0])


def table(found: Iterable[Prediction]) -> str:
    lines = [
        "| load | real, tok/s | simulated | error | a step, ms | a sequence, µs | a token of context, µs | pads | a prompt token, µs "
        "| a token before it, ns | a request, ms | server's cores | without one |",
        "|" + " --- |" * 13,
    ]
    lines += [
        f"| {p.load} | {p.real:.0f} | {p.predicted:.0f} | {p.error:+.1%} | {1e3 * p.fitted.fixed_s:.1f} | {1e6 * p.fitted.seq_s:.0f} "
        f"| {1e6 * p.fitted.context_s:.2f} | {'yes' if p.fitted.pads else 'no'} | {1e6 * p.fitted.token_s:.0f} "
        f"| {1e9 * p.fitted.attention_s:.0f} | {1e3 * p.fitted.request_s:.1f} | {p.cell['cores']:.2f} | {p.cell['starved']:.0%} |"
        for p in found
    ]
    return "\n".join(lines)


def rows() -> list[dict[str, Any]]:
    made = []
    for engine in ENGINES:
        if engine == "vllm" and not VLLM.exists():
            print("prediction: vLLM is left out, there is none: make vllm-env", file=sys.stderr)
            continue
        found = predictions(engine, WINDOW[1])
        print(f"{engine}\n\n{table(found)}\n", file=sys.stderr)
        worst = max(found, key=lambda each: abs(each.error))
        note = f"worst: {worst.load}, {worst.predicted:.0f} told, {worst.real:.0f} tokens/s seen"
        made.append(
            {"name": f"prediction_{engine}", "value": abs(worst.error), "unit": "off", "target": TARGET}
            | {"ok": abs(worst.error) <= TARGET, "note": note}
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prediction", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    args = parser.parse_args()
    print(table(predictions(args.engine, WINDOW[1])))


if __name__ == "__main__":
    main()
