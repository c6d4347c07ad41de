"""CPU per rollout from dispatcher through the sink to the packed batch, at 64 to 16,384 rollouts in flight.

The real core, driver and group processing, turn events included; the journal is not. Environment results are prebuilt:
the runner sleeps an exponential time, asks the turn gate once a turn, and hands back a finished record. The offered
load is half of what saturation was measured at; the ramp is not counted. Payload (a) is one turn of 256 prompt and
512 sampled tokens, (b) ten turns that come to 8,184 tokens.

`process_rps_*` saturates the same with everything a run has on that core: journal and rollout store, metrics, batches
packed and written as files.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench._bare_loop import BareLoop
from paceline.core.admission import FixedCap
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import PackedBatch
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.journal.writer import FileJournal
from paceline.observe.monitor import Monitor
from paceline.observe.run import RunFolds
from paceline.ports import Published, Shipment
from paceline.runtime.driver import Driver
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.offload import Threads
from paceline.runtime.processor import EnvProcessing, GroupProcessor
from paceline.testing import setup_for, train_env
from paceline.transport.filesystem import FilesystemBatches

IN_FLIGHT = (64, 512, 2048, 8192, 16384)
GROUP, BATCH = 8, 512
TARGET_US = {"a": 80.0, "b": 250.0}
PAIRS = 5
FLOOR_US = {"a": 23.5, "b": 89.0}
"""What a bare loop took on the machine that the targets were set on (middle of 21 to 26, and of 75 to 103)."""
ROWS = (
    *(f"dispatch_sink_{p}_us_{n}" for p in "ab" for n in IN_FLIGHT),
    *(f"loop_lag_p99_ms_{n}" for n in IN_FLIGHT),
    "dispatch_sink_growth",
    *(f"bare_loop_{p}_us" for p in "ab"),
    *(f"dispatch_sink_{p}_over_bare_loop" for p in "ab"),
    "rollout_kb_a",
    "rollout_kb_b",
    "process_rps_a",
    "process_rps_b",
)


def turns_of(payload: str) -> tuple[tuple[int, int], ...]:
    """(prompt ids, sampled ids) of each turn."""
    return ((256, 512),) if payload == "a" else ((384, 500),) + ((311, 500),) * 9 + ()


class Payload:
    """Prebuilt arrays, shared by all rollouts; records are made anew."""

    def __init__(self, payload: str) -> None:
        rng = np.random.default_rng(0)
        self.shape = turns_of(payload)
        self.prompts = [rng.integers(1, 30_000, p, dtype=np.int32) for p, _ in self.shape]
        self.sampled = [rng.integers(1, 30_000, s, dtype=np.int32) for _, s in self.shape]
        self.logprobs = [np.full(s, -0.7, dtype=np.float32) for _, s in self.shape]

    def turns(self, version: int) -> tuple[Turn, ...]:
        return tuple(
            [
                Turn(
                    prompt_ids=self.prompts[i],
                    sampled_ids=self.sampled[i],
                    logprobs=self.logprobs[i],
                    versions=((version, s),),
                    extends=i > 0,
                    finish="stop",
                )
                for i, (_, s) in enumerate(self.shape)
            ]
        )


class Runner:
    """Stands in for environment and engine: their results are there, after a sleep."""

    def __init__(self, payload: Payload, gates: Gates, mean_s: float) -> None:
        self.payload = payload
        self.gates = gates
        self.mean_s = mean_s
        self.random = random.Random(0)

    async def run(self, command: do.StartRollout) -> Rollout:
        if self.mean_s:
            await asyncio.sleep(self.random.expovariate(1.0 / self.mean_s))
        context = 0
        for prompt, sampled in self.payload.shape:
            context += prompt
            grant = self.gates.request(on.TurnRequested(command.rollout, context, sampled))
            if not isinstance(grant, do.GrantTurn):
                grant = await grant
            self.gates.report(
                on.SegmentEnded(command.rollout, grant.engine, ((grant.version, sampled),), "stop")
            )
            context += sampled
        return Rollout(
            id=command.rollout,
            task=command.task,
            outcome=COMPLETED,
            turns=self.payload.turns(grant.version),
            reward=self.random.random(),
        )

    def cancel(self, rollout: Any, cause: str) -> None:
        """Nothing is cancelled here."""


class Sink:
    """Takes packed batches and publishes a version for each at once: the trainer costs nothing."""

    def __init__(self, files: FilesystemBatches | None = None) -> None:
        self.files = files
        self.published: asyncio.Queue[int] = asyncio.Queue()

    async def ship(self, packed: PackedBatch) -> Shipment:
        shipped = Shipment(0) if self.files is None else await self.files.ship(packed)
        self.published.put_nowait(packed.batch.step)
        return shipped

    async def next(self) -> Published:
        step = await self.published.get()
        # After BatchShipped, which the driver posts when `ship` has returned.
        await asyncio.sleep(0)
        return Published(version=step, path="", trained_step=step)


class Engine:
    async def update_weights(self, version: int, path: str) -> None:
        """At once."""


class NoJournal:
    def append(self, at: float, event: on.Event, commands: Sequence[do.Command]) -> None:
        """Not measured here."""

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


class NoCheckpoints:
    def save(self, step: int, state: dict[str, Any]) -> None: ...


class Packing:
    seq_len = 8192
    micro_batch_tokens = 16384
    data_parallel = 8
    pad_to_multiple_of = 1


class Enough(Exception):
    """The measurement is over."""


class Meter:
    """Counts ended rollouts and starts and stops the clocks at given counts."""

    def __init__(self, ramp: int, count: int, done: Any) -> None:
        self.ramp, self.count, self.done = ramp, count, done
        self.ended = 0
        self.cpu = self.wall = 0.0
        self.lags: list[float] = []

    def apply(self, at: float, event: on.Event, commands: Sequence[do.Command]) -> None:
        if type(event) is on.RolloutEnded:
            self.ended += 1
            if self.ended == self.ramp:
                self.cpu, self.wall = time.process_time(), time.perf_counter()
                self.lags.clear()
            elif self.ended == self.ramp + self.count:
                self.cpu = time.process_time() - self.cpu
                self.wall = time.perf_counter() - self.wall
                self.done()

    async def watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time()
            await asyncio.sleep(0.005)
            self.lags.append(loop.time() - asked - 0.005)


async def drive(
    payload: str, in_flight: int, rate: float | None, count: int, whole: Path | None = None
) -> dict[str, float]:
    """One measurement; `rate` None saturates. `whole`: a run directory for journal, batches and metrics."""
    inbox = Inbox()
    gates = Gates(inbox)
    lag = 2 + 2 * in_flight // BATCH
    setup = setup_for(
        train_env(group_size=GROUP), batch=BATCH, lag=lag, max_staleness=lag, max_steps=10**9, seq_len=8192
    )
    core = Core(setup, FixedCap(in_flight))
    sink = Sink(None if whole is None else FilesystemBatches(whole, "bench", keep=2))
    journal = NoJournal() if whole is None else FileJournal(whole, "bench")
    folds = [] if whole is None else [Monitor(RunFolds(live=True))]
    groups, offload = Threads(), Threads()
    driver: Driver
    meter = Meter(2 * in_flight if rate else in_flight, count, lambda: driver.fail(Enough()))
    driver = Driver(
        core,
        inbox=inbox,
        gates=gates,
        runner=Runner(Payload(payload), gates, in_flight / rate if rate else 0.0),  # type: ignore[arg-type]
        engines={"e0": Engine()},  # type: ignore[dict-item]
        processor=GroupProcessor(
            {"env": EnvProcessing(GroupRules(env="env", seq_len=8192), builtin("grpo", {}))}, groups
        ),
        sink=sink,
        policy=sink,
        journal=journal,
        checkpoints=NoCheckpoints(),
        packing=Packing(),
        offload=offload,
        folds=[meter, *folds],
    )
    driver.beside("lag meter", meter.watch_lag)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    with contextlib.suppress(Enough), warnings.catch_warnings():
        # Stopped in full flight: tasks that were made and have not begun are not awaited.
        warnings.simplefilter("ignore", RuntimeWarning)
        await driver.run(on.RunOpened("bench", 0), [on.EngineJoined(EngineInfo("e0", None, None), 0)])
    groups.close()
    offload.close()
    await journal.close()
    lags = np.array(meter.lags or [0.0]) * 1000
    return {
        "us": meter.cpu / count * 1e6,
        "rps": count / meter.wall,
        "lag_p50": float(np.percentile(lags, 50)),
        "lag_p99": float(np.percentile(lags, 99)),
        "lag_max": float(lags.max()),
    }


async def _bare(payload: str, in_flight: int, rate: float | None, count: int) -> float:
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    return await BareLoop(turns_of(payload), in_flight, rate, count).run()


def held_kb(payload: str) -> float:
    """Resident memory of a rollout record held, in KB."""
    made = Payload(payload)
    count = 4000 if payload == "a" else 800
    before = _resident_kb()
    held = [_with_arrays_of_its_own(made.turns(0)) for _ in range(count)]
    after = _resident_kb()
    assert held
    return (after - before) / count


def _with_arrays_of_its_own(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    arrays = ("prompt_ids", "sampled_ids", "logprobs")
    return tuple([msgspec.structs.replace(t, **{a: getattr(t, a).copy() for a in arrays}) for t in turns])


def _resident_kb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1024


def _in_process(*words: str) -> Any:
    """A measurement in a fresh process on one core, so that none inherits another's heap."""
    code = [sys.executable, "-m", "bench.dispatch_sink", *words]
    pinned = ["taskset", "-c", "0", *code] if os.path.exists("/usr/bin/taskset") else code
    return msgspec.json.decode(subprocess.run(pinned, check=True, stdout=subprocess.PIPE).stdout)


def rows() -> list[dict[str, Any]]:
    result = []
    for payload in "ab":
        saturated = _in_process(payload, "512", "0", "8000" if payload == "a" else "3000")["rps"]
        costs = {}
        for n in IN_FLIGHT:
            count = max(4000, n) if payload == "a" else max(2000, n // 2)
            seen = _in_process(payload, str(n), f"{saturated / 2}", str(count))
            costs[n] = seen["us"]
            note = f"{seen['rps']:.0f} rollouts/s offered, saturation {saturated:.0f}"
            result.append(row(f"dispatch_sink_{payload}_us_{n}", seen["us"], "us", TARGET_US[payload], note))
            if payload == "a":
                spread = f"p50 {seen['lag_p50']:.2f}, max {seen['lag_max']:.1f} ms"
                result.append(row(f"loop_lag_p99_ms_{n}", seen["lag_p99"], "ms", 10.0, spread))
        floors, ratios = [], []
        # In turns: a machine that others use too is not as fast from one minute to the next.
        for _ in range(PAIRS):
            ours, floor = (
                _in_process(*words, payload, "64", f"{saturated / 2}", "2000")["us"]
                for words in ((), ("bare",))
            )
            floors.append(floor)
            ratios.append(ours / floor)
        note = "64 in flight, the same load"
        result.append(row(f"bare_loop_{payload}_us", statistics.median(floors), "us", None, note))
        note = (
            f"median of {PAIRS} pairs, {min(ratios):.2f} to {max(ratios):.2f}; target: {TARGET_US[payload]:g} us over the "
            f"floor of {FLOOR_US[payload]:g} us it was set with"
        )
        most = TARGET_US[payload] / FLOOR_US[payload]
        result.append(
            row(f"dispatch_sink_{payload}_over_bare_loop", statistics.median(ratios), "x", most, note)
        )
        if payload == "a":
            growth = costs[IN_FLIGHT[-1]] / costs[IN_FLIGHT[0]]
            result.append(row("dispatch_sink_growth", growth, "x", 1.3, "payload a, 16,384 against 64"))
        result.append(
            row(
                f"rollout_kb_{payload}",
                _in_process("held", payload)["kb"],
                "KB",
                10.0 if payload == "a" else 90.0,
            )
        )
        least = 4000.0 if payload == "a" else 1000.0
        rps = _in_process("whole", payload, "8000" if payload == "a" else "3000")["rps"]
        result.append(
            {"name": f"process_rps_{payload}", "value": rps, "unit": "rollouts/s", "target": least}
            | {"ok": rps >= least, "note": "saturated, 512 in flight, journal and batches on disk"}
        )
    return result


def row(name: str, value: float, unit: str, target: float | None, note: str = "") -> dict[str, Any]:
    ok = None if target is None else value <= target
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "note": note}


def main() -> None:
    if sys.argv[1] == "held":
        answer: dict[str, float] = {"kb": held_kb(sys.argv[2])}
    elif sys.argv[1] == "whole":
        with tempfile.TemporaryDirectory() as folder:
            answer = asyncio.run(drive(sys.argv[2], 512, None, int(sys.argv[3]), Path(folder)))
    elif sys.argv[1] == "bare":
        payload, n, rate, count = sys.argv[2:]
        answer = {"us": asyncio.run(_bare(payload, int(n), float(rate) or None, int(count)))}
    else:
        payload, n, rate, count = sys.argv[1:]
        answer = asyncio.run(drive(payload, int(n), float(rate) or None, int(count)))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
