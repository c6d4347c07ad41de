"""How fast the simulator is: the production core on modelled engines, and the real runtime on virtual time.

CPU seconds of one process. S1 and S3 are the workloads of `examples/studies`: RollPacker's short answers without memory
pressure, and Seer's long ones with it.

    python -m bench --only simulation
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

from paceline.config import Limits, SamplingSection
from paceline.core.admission import FixedCap
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.sim.engine import GPUS, MODELS, Call, EngineModel, Speed, speed_of
from paceline.sim.engine.endpoint import drive
from paceline.sim.simulation import Simulation
from paceline.sim.workloads import PRESETS, workload_of
from paceline.sim.world import TrainerModel
from paceline.testing import setup_for, train_env
from paceline.testing.modelled import Book, ModelledEngine, ModelledEnv
from paceline.testing.run import run_driver
from paceline.testing.trainer import ScriptedTrainer

ROWS = (
    "sim_requests_per_s",
    "sim_requests_per_s_s3",
    "sim_events_per_s",
    "runtime_virtual_turns_per_s",
    "sim_realtime_s3_10k",
    "sim_realtime_s1_10k",
)
SEQ_LEN = 1 << 17
S1 = speed_of(MODELS["qwen2.5-14b"], GPUS["H800"], gpus=2, slow=1.8, max_model_len=24_000)
S3 = speed_of(MODELS["qwen2.5-72b"], GPUS["H800"], gpus=8, slow=2.0, max_model_len=60_000)


def setup(batch: int, group: int, lag: int) -> CoreSetup:
    return setup_for(
        train_env(group_size=group), batch=batch, lag=lag, max_staleness=1000, max_steps=10**6, seq_len=SEQ_LEN,
        dead_group_limit=10**9, checkpoint_every=10**9,
    )  # fmt: skip


def simulation(preset: str, speed: Speed, engines: int, cap: int, of: CoreSetup) -> Simulation:
    return Simulation(
        Core(of, FixedCap(cap)),
        {f"e{n}": EngineModel(speed) for n in range(engines)},
        {"env": workload_of(PRESETS[preset], 1)},
        algorithm=builtin("grpo", {}),
        rules={"env": GroupRules(env="env", seq_len=SEQ_LEN, zero_advantage=False)},
        trainer=TrainerModel(),
    )


def timed(work: Callable[[], Any]) -> float:
    began = process_time()
    work()
    return process_time() - began


def requests(preset: str, speed: Speed, of: CoreSetup, cap: int, steps: int) -> tuple[float, float]:
    """Rollouts, each one request, and engine events a second."""
    best = 0.0, 0.0
    for _ in range(2):
        sim = simulation(preset, speed, 16, cap, of)
        took = timed(lambda sim=sim: sim.run(steps=steps))
        done = sim.core.account.of("train", "env").launched
        best = max(best, (done / took, sum(e.totals.events for e in sim.engines.values()) / took))
    return best


def engine_events() -> float:
    """Of engines alone: 3,000 requests of S3 on one engine, its cache full all the time."""
    best = 0.0
    sim = simulation("seer-qwen-vl", S3, 1, 3000, setup(4000, 16, 0))
    sim.run(events=2)
    lengths = [run.plan.sampled for run in sim.running.values()][:3000]
    for _ in range(2):
        engine = EngineModel(S3)
        for number, length in enumerate(lengths):
            chain = ((("g", number // 16), 37),)
            engine.submit(Call(number, 600, length, chain=chain), 0.0)
        best = max(best, engine_rate(engine))
    return best


def engine_rate(engine: EngineModel) -> float:
    took = timed(lambda: drive(engine))
    return engine.totals.events / took


def realtime(preset: str, speed: Speed) -> float:
    """Virtual seconds by CPU seconds with 10,000 rollouts in flight on 64 engines, after they have been started."""
    sim = simulation(preset, speed, 64, 157, setup(2048, 16, 10))
    sim.run(events=25_000)
    since = sim.now
    took = timed(lambda: sim.run(events=60_000))
    return (sim.now - since) / took


def runtime_turns() -> float:
    """Turns a second of the whole asyncio runtime on a virtual-time loop, its checks included."""
    of = setup_for(
        train_env(group_size=8), batch=64, lag=1, max_steps=1, seq_len=SEQ_LEN, dead_group_limit=10**9
    )
    book = Book({"env": workload_of(PRESETS["search"], 1)})
    speed = Speed(max_model_len=32_768)
    took = process_time()
    run = run_driver(
        of,
        {"env": ModelledEnv(book)},
        engines=lambda: [ModelledEngine(f"e{n}", speed, book) for n in range(2)],
        trainer=ScriptedTrainer,
        cap=32,
        limits=Limits(deadline_s=1e9),
        sampling=SamplingSection(max_tokens=SEQ_LEN - 1),
        rules=lambda env: GroupRules(env=env, seq_len=SEQ_LEN),
        watch=False,
    )
    took = process_time() - took
    return sum(len(rollout.turns) for rollout in run.rollouts) / took


def rows() -> list[dict[str, Any]]:
    s1, _ = requests("rp-16k", S1, setup(1024, 8, 1), 128, 20)
    s3, _ = requests("seer-qwen-vl", S3, setup(9600, 16, 0), 608, 1)
    found = [
        ("sim_requests_per_s", s1, "1/s", 8000, "S1, production core, 16 engines, lag 1"),
        ("sim_requests_per_s_s3", s3, "1/s", None, "S3: long answers, caches full, preemptions"),
        ("sim_events_per_s", engine_events(), "1/s", 100_000, "engine alone, S3's lengths, its cache full"),
        ("runtime_virtual_turns_per_s", runtime_turns(), "1/s", 1000, "real driver, runner and gate on virtual time"),
        ("sim_realtime_s3_10k", realtime("seer-qwen-vl", S3), "x", 100, "10,000 in flight on 64 engines, S3's lengths"),
        ("sim_realtime_s1_10k", realtime("rp-16k", S1), "x", 20, "the same with S1's lengths"),
    ]  # fmt: skip
    return [
        {"name": name, "value": value, "unit": unit, "target": target, "note": note}
        | {"ok": None if target is None else value >= target}
        for name, value, unit, target, note in found
    ]
