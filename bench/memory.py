"""Whether a long run grows: resident memory over 1,000,000 rollouts through the production core and a live run's folds.

Every rollout is started, takes a turn, ends, is judged with its group, waits, ships and is trained, 1,953 batches of 512
in all. What a run keeps for good (a row of metrics a step, at most 1,024 of them) is full after half of it.

    python -m bench --only memory
"""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import psutil

from bench._core_loop import CoreLoop
from paceline.observe.run import RunFolds
from paceline.testing import setup_for, train_env

ROWS = ("memory_1m_rollouts_growth", "memory_1m_rollouts_mb")
ROLLOUTS = 1_000_000
TARGET = 1.02


def grown() -> list[float]:
    """Megabytes after each tenth."""
    setup = setup_for(
        train_env(group_size=8), batch=512, lag=1, max_steps=10**6, seq_len=512, dead_group_limit=10**9,
        checkpoint_every=100,
    )  # fmt: skip
    folds = RunFolds(live=True)
    loop = CoreLoop(setup, folds.apply, cap=2048, turns=1)
    process, seen = psutil.Process(), []
    for tenth in range(1, 11):
        loop.run(tenth * ROLLOUTS // 10)
        gc.collect()
        seen.append(process.memory_info().rss / 1e6)
    return seen


def rows() -> list[dict[str, Any]]:
    """In a process of its own: what ran before would be counted else."""
    code = "from bench.memory import grown; print(*grown())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen = [float(word) for word in done.stdout.split()]
    half, end = seen[4], seen[-1]
    told = ", ".join(f"{mb:.0f}" for mb in seen)
    return [
        {
            "name": "memory_1m_rollouts_growth",
            "value": end / half,
            "unit": "x",
            "target": TARGET,
            "ok": end / half <= TARGET,
            "note": f"resident memory after 1,000,000 rollouts / after 500,000; MB at each 100,000: {told}",
        },
        {
            "name": "memory_1m_rollouts_mb",
            "value": end,
            "unit": "MB",
            "target": None,
            "ok": None,
            "note": "core and folds of a live run, Python and numpy included",
        },
    ]
