"""Rollouts that wait on tools, and what a worker process costs against running inline.

`waiting_5000_*`: 5,000 rollouts in one process, on the real rollout runner, recorder and bridge; each makes a call and
then waits 4 to 36 s on its tool, over and over. The engine answers at once: what is measured is the waiting, not it.
`worker_*_rps`: rollouts of one short call a second, 256 at once, saturated.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cli.environments import environment_of
from paceline.config import EnvSection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.events import SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.task import TaskRef
from paceline.envs import Environment
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.runner import RolloutRunner
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge

WAITING = 5000
AT_ONCE, MEASURED_S, RAMP_S = 256, 6.0, 3.0
ROWS = (
    "waiting_5000_rss_mb",
    "waiting_5000_lag_p99_ms",
    "worker_inline_rps",
    "worker_process_rps",
    "worker_process_2_rps",
    "worker_ray_rps",
    "worker_process_share",
)

TOKENIZER = byte_tokenizer()
ANSWER = np.array([*TOKENIZER.encode("eight"), TOKENIZER.stop_ids[0]], np.int32)
LOGPROBS = np.full(len(ANSWER), -0.5, np.float32)


class Engine:
    """Answers at once."""

    info = EngineInfo("e0", None, None)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return GenerateReply(ANSWER, LOGPROBS, "stop", ((0, len(ANSWER)),))

    async def abort(self, request_id: str) -> None: ...


class Gate:
    """Grants every turn at once."""

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, "e0", 0))
        return granted

    def report(self, event: SegmentEnded) -> None: ...


def runner_of(environment: Environment) -> RolloutRunner:
    shared = EnvRuntime(
        environment=environment,
        source=environment.tasks("train"),
        limits=Limits(),
        sampling=SamplingSection(max_tokens=16),
        bridge=Bridge(TOKENIZER),
    )
    clock = asyncio.get_running_loop().time
    return RolloutRunner({("train", "env"): shared}, {"e0": Engine()}, Gate(), clock)  # type: ignore[dict-item]


async def rollouts(runner: RolloutRunner, first: int, until: float, done: list[float]) -> None:
    """One after the other until the time is up."""
    loop = asyncio.get_running_loop()
    group = first
    while loop.time() < until:
        rollout = RolloutId(group, 0)
        ended = await runner.run(StartRollout(rollout, TaskRef("env", "train", group), group, group, "e0", 0))
        assert ended.outcome.ending in ("completed", "cancelled"), ended.outcome
        done.append(loop.time())
        group += 1_000_000


# ── waiting ──


async def waiting() -> dict[str, float]:
    from bench._waiting import Waits

    loop = asyncio.get_running_loop()
    runner = runner_of(Waits())
    tasks = [
        loop.create_task(runner.run(StartRollout(RolloutId(n, 0), TaskRef("env", "train", n), n, n, "e0", 0)))
        for n in range(WAITING)
    ]
    await asyncio.sleep(10.0)  # the first turns of all, and their spreading over the waits
    late: list[float] = []
    until = loop.time() + 15.0
    while loop.time() < until:
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        late.append(loop.time() - due)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert runner.running == WAITING
    for n in range(WAITING):
        runner.cancel(RolloutId(n, 0), "shutdown")
    await asyncio.gather(*tasks)
    return {"rss_mb": rss, "lag_p99_ms": 1000 * float(np.percentile(late, 99))}


# ── workers ──


async def rate(**workers: Any) -> float:
    """Rollouts a second."""
    section = EnvSection.model_validate({"id": "bench._waiting:Short", "name": "env", "workers": workers})
    with tempfile.TemporaryDirectory() as logs:
        environment = await environment_of(section, "train", logs=Path(logs))
        try:
            runner = runner_of(environment)
            done: list[float] = []
            began = asyncio.get_running_loop().time()
            until = began + RAMP_S + MEASURED_S
            await asyncio.gather(*(rollouts(runner, n, until, done) for n in range(AT_ONCE)))
        finally:
            await environment.close()
    return sum(at > began + RAMP_S for at in done) / MEASURED_S


KINDS: dict[str, dict[str, Any]] = {
    "inline": {"type": "inline"},
    "process": {"type": "process"},
    "process_2": {"type": "process", "count": 2},
    "ray": {"type": "ray"},
}


def in_own_process(what: str) -> Any:
    """A number that depends on nothing that was measured before."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.workers", what],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows() -> list[dict[str, Any]]:
    found = []

    def row(name: str, value: float, unit: str, target: float | None, ok: bool | None, note: str) -> None:
        found.append({"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "note": note})

    seen = in_own_process("waiting")
    row("waiting_5000_rss_mb", seen["rss_mb"], "MB", 2048, seen["rss_mb"] < 2048, "the whole process")
    row("waiting_5000_lag_p99_ms", seen["lag_p99_ms"], "ms", 10, seen["lag_p99_ms"] < 10, "")
    rates: dict[str, float] = {}
    for kind in KINDS:
        if kind == "ray" and importlib.util.find_spec("ray") is None:
            continue
        rates[kind] = in_own_process(kind)["rps"]
        row(f"worker_{kind}_rps", rates[kind], "rollouts/s", None, None, f"{AT_ONCE} at once, one call each")
    row("worker_process_share", rates["process"] / rates["inline"], "of inline", None, None, "one worker")
    return found


def main(words: Sequence[str]) -> None:
    (what,) = words
    began = time.perf_counter()
    if what == "waiting":
        told: dict[str, float] = asyncio.run(waiting())
    else:
        told = {"rps": asyncio.run(rate(**KINDS[what]))}
    print(json.dumps({**told, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(sys.argv[1:])
