"""What it costs to keep a rollout while it is under way: one part, of an engine request that sampled 2,048 tokens on a prompt
with 512 new ones.

`part_loop_us` is what the event loop pays, `part_cpu_us` what the writing thread pays for packing it, without the write;
both in CPU. A part whose rollout ends within the 0.2 s to the next write costs the first alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

import msgspec
import numpy as np

from paceline.domain.ids import RolloutId
from paceline.domain.part import Asked, Part
from paceline.journal import FileJournal, partial
from paceline.journal.partial import PartStore

PROMPT, SAMPLED = 512, 2048
PARTS = 512
TARGETS = {"part_loop_us": 5.0, "part_cpu_us": 350.0, "part_bytes_per_token": 6.0}
ROWS = tuple(TARGETS)
_UNITS = {"part_loop_us": "us", "part_cpu_us": "us", "part_bytes_per_token": "bytes"}


def _parts() -> list[Part]:
    random = np.random.default_rng(0)

    def ids(count: int) -> Any:
        return random.zipf(1.3, count).clip(0, 150_000).astype(np.int32)

    asked, versions = Asked(8192), ((1, SAMPLED),)
    return [
        Part(
            RolloutId(number // 8, number % 8),
            0,
            0,
            0,
            -1,
            ids(PROMPT),
            ids(SAMPLED),
            -random.exponential(0.5, SAMPLED).astype(np.float32),
            versions,
            "abort",
            asked,
            "e0",
        )
        for number in range(PARTS)
    ]


async def _measured(parts: list[Part]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        journal = FileJournal(folder, "bench")
        store = PartStore(folder, "bench", journal, fsync_s=3600)
        fields = [msgspec.structs.astuple(part) for part in parts]
        began = time.thread_time()
        for each in fields:
            store.keep(Part(*each))
        loop = time.thread_time() - began
        await store.close()
        await journal.close()
        nbytes = store.nbytes
    began = time.thread_time()
    for block in partial.blocks(parts):
        partial.packed(block)
    cpu = time.thread_time() - began
    return {
        "part_loop_us": 1e6 * loop / PARTS,
        "part_cpu_us": 1e6 * cpu / PARTS,
        "part_bytes_per_token": nbytes / (PARTS * SAMPLED),
    }


def rows() -> list[dict[str, Any]]:
    """The best of three: what another process takes is not ours."""
    parts = _parts()
    runs = [asyncio.run(_measured(parts)) for _ in range(3)]
    best = {name: min(run[name] for run in runs) for name in ROWS}
    note = f"{PROMPT} new prompt tokens, {SAMPLED} sampled"
    return [
        {
            "name": name,
            "value": value,
            "unit": _UNITS[name],
            "target": TARGETS[name],
            "ok": value <= TARGETS[name],
            "note": note,
        }
        for name, value in best.items()
    ]
