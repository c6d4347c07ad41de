"""Whole runs of the examples, with the reference trainer and without evals, and the simulation of them.

Orchestrator, engine and trainer share the cores of the machine. They did so too in the runs that engine, trainer and weights are
fitted to, so what they take from each other is in the constants, on the mean: an engine's step is as slow as it was with a trainer
beside it. `FIT` are those runs, in other environments than those of the examples that are told.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._pinned import BATCHED, MOST_SEQS
from bench.vllm_admission import ROOT, serving
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.config.toml import toml_key, toml_value
from paceline.journal import read_journal
from paceline.sim.cells import run_cell
from paceline.sim.measure import Measure
from paceline.sim.metrics import summarize
from paceline.sim.recorded_world import recorded_world
from paceline.sim.requests import Record
from paceline.sim.study import StudyConfig

POLICY = ROOT / "src" / "paceline" / "assets" / "small_policy"
STEPS, SKIPPED = 24, 4
"""Steps of a run, and those at its beginning that do not count."""
MOST_S = 1800.0
"""Seconds that one run may take; it takes some minutes."""
TOLD = ("reverse-text", "guess-number")


def _alone(env: str, cap: int, batch: int) -> dict[str, Any]:
    return {
        "env": [{"id": env, "group_size": 8}],
        "sampling": {"max_tokens": 32},
        "admission": {"cap": cap},
        "batch": {"rollouts": batch, "seq_len": 256, "micro_batch_tokens": 4096},
        "filters": {"zero_advantage": False},
    }


FIT: dict[str, dict[str, Any]] = {
    "few": _alone("bench._long_texts:LongTexts", 8, 32),
    "wide": _alone("bench._long_texts:LongTexts", 48, 64),
    "short": _alone("arithmetic", 32, 64),
    "many": {"env": [{"id": "store-search", "args": {"wait_s": 0.05}, "group_size": 8}]},
}
"""What differs from the example of store-search: few long answers at a time and small batches; many of them; short ones; many at a
time with several turns and large batches."""


@dataclass(frozen=True, slots=True)
class Run:
    """One that is over."""

    config: RunConfig
    records: Sequence[Record]
    cores: float
    """That all its processes had, on the mean."""

    @property
    def goodput(self) -> float:
        """Trained tokens a second, after the first steps."""
        measure = Measure()
        for record in self.records:
            measure.apply(*record)
        found = summarize(measure, SKIPPED)
        if found is None:
            raise RuntimeError(f"a run took no step after the first {SKIPPED}")
        return found.goodput


def runs(engine: str, folder: Path) -> tuple[list[Run], dict[str, Run]]:
    """The runs to fit to, and those to be told."""
    fit = [_run("store-search", name, changes, engine, folder) for name, changes in FIT.items()]
    return fit, {name: _run(name, name, {}, engine, folder) for name in TOLD}


def _run(example: str, name: str, changes: Mapping[str, Any], engine: str, folder: Path) -> Run:
    config = tomllib.loads((ROOT / "examples" / example / "run.toml").read_text())
    del config["eval"]
    config |= deepcopy(dict(changes))
    config["run"] |= {"dir": str(folder), "name": name, "max_steps": STEPS}
    with serving(POLICY) if engine == "vllm" else nullcontext() as server:
        before = 0.0
        if server is not None:
            config["engine"] = {"type": "vllm", "urls": [server.url]}
            before, _ = server.cpu_s()
        path = folder / f"{name}.toml"
        path.write_text("".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in config.items()))
        began, used = time.monotonic(), _children_s()
        done = _finished(name, [sys.executable, "-m", "paceline", "run", str(path), "--plain"])
        wall, used = time.monotonic() - began, _children_s() - used
        if server is not None:
            used += server.cpu_s()[0] - before
    if done.returncode:
        raise RuntimeError(
            f"the run {name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    records = [(r.at, r.event, r.commands) for r in read_journal(folder / name)]
    return Run(load(RunConfig, [path]).value, records, used / wall)


def _finished(name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """RuntimeError when it takes more than `MOST_S`; trainer and engines of a run end with it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, cwd=ROOT)
    except subprocess.TimeoutExpired as late:
        said = b"".join(part for part in (late.stdout, late.stderr) if part).decode(errors="replace")
        raise RuntimeError(
            f"the run {name} was stopped after {MOST_S:.0f} s without its {STEPS} steps: something in it hangs, or the machine is too "
            f"busy to measure on. Its last words:\n{said[-3000:]}"
        ) from late


def _children_s() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def simulated(fit: Sequence[Record], told: Run) -> float:
    """Goodput of the simulation of a run, on engines, trainer and weights fitted to the records of others."""
    world = recorded_world(fit)
    config = told.config
    study = StudyConfig.model_validate(
        {
            "study": {"steps": config.run.max_steps - SKIPPED, "skip_steps": SKIPPED, "zero_signal": True},
            "engines": {
                "recorded": "fit",
                "max_num_seqs": MOST_SEQS,
                "max_batched_tokens": BATCHED[config.engine.type],
            },
            "batch": config.batch.model_dump(),
            "trainer": world.trainer.model_dump(),
            "weights": world.weights.model_dump(),
            "workload": [{"name": "told", "env": [{"journal": "told"}]}],
            "policy": [
                {
                    "name": "told",
                    "scheduling": config.scheduling.model_dump(),
                    "admission": config.admission.model_dump(),
                }
            ],
        }
    )
    (policy,), (workload,) = study.policy, study.workload
    journals = {"fit": fit, "told": told.records}
    return run_cell(study, policy, workload, config.run.seed, journals.__getitem__).numbers["goodput"]
