"""What `--resume` takes with a journal of 100,000 rollouts, from its newest checkpoint to a core that can go on.

The journal is that of the production core: three turns a rollout, batches of 512, a checkpoint every ten of them, killed
in the middle of the tenth step after the last. A process of its own reads it back, as `paceline run --resume` does: the
records behind the checkpoint are folded, what is owed is fetched from the rollout store, and metrics and live view hear of
the lives before.

    python -m bench --only recovery
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench._core_loop import CoreLoop
from paceline.config import RunConfig
from paceline.journal import FileJournal
from paceline.runtime.checkpoints import Checkpoints
from paceline.testing import setup_for, train_env
from paceline.transport.layout import BATCHES, WEIGHTS
from paceline.transport.status import RunStatus, write_status

ROWS = ("recovery_100k_s", "recovery_100k_cpu_s", "recovery_100k_reading_s", "recovery_100k_mb")
ROLLOUTS = 100_000
TARGET_S = 20.0
CHECKPOINT_EVERY = 10
CONFIG = RunConfig.model_validate(
    {
        "model": {"name": "policy"},
        "env": [{"id": "bench:env", "name": "env", "group_size": 8}],
        "trainer": {"type": "external"},
        "checkpoint": {"every": CHECKPOINT_EVERY},
    }
)


async def write(run_dir: Path) -> int:
    """The run directory of a run that was killed; returns the bytes of its journal."""
    setup = setup_for(
        train_env(group_size=8), batch=512, lag=1, max_steps=10**6, seq_len=1024, dead_group_limit=10**9,
        checkpoint_every=CHECKPOINT_EVERY,
    )  # fmt: skip
    journal = FileJournal(run_dir, "bench")
    loop = CoreLoop(setup, journal.append, cap=2048, turns=3)
    for rollouts in range(5_000, ROLLOUTS + 1, 5_000):
        loop.run(rollouts)
        await journal.flush()
    await journal.close()
    ((step, state),) = loop.saved
    Checkpoints(run_dir / "checkpoints" / "core", 3).save(step, state)
    for cut in range(1, loop.core.cut + 1):
        (run_dir / BATCHES / f"step_{cut:06d}").mkdir(parents=True)
    (run_dir / WEIGHTS).mkdir()
    write_status(run_dir, RunStatus(run_id="bench", status="failed"))
    return journal.nbytes


def resume(run_dir: Path) -> None:
    """Print the seconds that it takes, by the clock and of CPU, and those that the folds over earlier lives take."""
    import time

    from paceline.cli.resume import resumption
    from paceline.cli.run import _earlier_lives
    from paceline.core.admission import FixedCap
    from paceline.core.scheduler import Core
    from paceline.observe.run import RunFolds

    began, cpu = time.perf_counter(), time.process_time()
    _, goes_on, _ = resumption(run_dir, CONFIG)
    if goes_on is None or goes_on.rollouts is None:
        raise RuntimeError("it would not go on from the journal")
    setup = setup_for(train_env(group_size=8), batch=512, lag=1, max_steps=10**6, seq_len=1024)
    Core(setup, FixedCap(2048)).restore(goes_on.state, goes_on.trained, "", goes_on.rollouts)
    folded = time.perf_counter()
    folds = RunFolds(live=True)
    _earlier_lives(run_dir, folds)
    if folds.account.lines()[0].launched < ROLLOUTS:
        raise RuntimeError(f"the folds know of {folds.account.lines()[0].launched} rollouts")
    ended = time.perf_counter()
    print(ended - began, time.process_time() - cpu, ended - folded)


def rows() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        nbytes = asyncio.run(write(Path(name)))
        code = f"from pathlib import Path; from bench.recovery import resume; resume(Path({name!r}))"
        done = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
    whole, cpu, reading = min([tuple(map(float, text.split())) for text in done])
    return [
        {
            "name": "recovery_100k_s",
            "value": whole,
            "unit": "s",
            "target": TARGET_S,
            "ok": whole <= TARGET_S,
            "note": "wall seconds of a resumption, without starting engines and trainer",
        },
        {
            "name": "recovery_100k_cpu_s",
            "value": cpu,
            "unit": "s",
            "target": None,
            "ok": None,
            "note": "CPU seconds of the same",
        },
        {
            "name": "recovery_100k_reading_s",
            "value": reading,
            "unit": "s",
            "target": None,
            "ok": None,
            "note": "of it, metrics and live view hear of all earlier records",
        },
        {
            "name": "recovery_100k_mb",
            "value": nbytes / 1e6,
            "unit": "MB",
            "target": None,
            "ok": None,
            "note": "journal and rollout store",
        },
    ]
