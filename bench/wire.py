"""How compact the wire is, and what encoding and decoding cost: 512 samples of 4,096 tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.core.packing import pack
from paceline.domain.batch import Batch
from paceline.domain.ids import RolloutId
from paceline.domain.sample import Sample
from paceline.transport.wire import decode, encode

ROWS = (
    "wire_bytes_per_token",
    "wire_bytes_per_token_short",
    "wire_encode_ms",
    "wire_decode_ms",
)


def make_batch(samples: int, tokens: int) -> Batch:
    noise = np.random.default_rng(0)
    rows = []
    for number in range(samples):
        trainable = np.arange(tokens) >= tokens // 3
        trained = int(trainable.sum())
        rows.append(
            Sample(
                token_ids=noise.integers(0, 150_000, tokens).astype(np.int32),
                trainable=trainable,
                logprobs=np.where(trainable, -noise.random(tokens), 0).astype(np.float32),
                versions=((3, trained // 2), (4, trained - trained // 2)),
                rollout=RolloutId(number // 8, number % 8),
                env="bench",
                task_index=number // 8,
                ending="completed",
                reward=float(number % 2),
                temperature=1.0,
                advantage=float(noise.normal()),
            )
        )
    return Batch(step=5, samples=tuple(rows), rollouts=tuple(row.rollout for row in rows))


def cpu_ms(work: Callable[[], Any], times: int = 7) -> float:
    """Least CPU time of a few runs, in milliseconds."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best * 1e3


def rows() -> list[dict[str, Any]]:
    batch = make_batch(512, 4096)
    packed = pack(batch, ranks=1, micro_batch_tokens=32_768)
    encoded = encode(packed, 0, run_id="bench")
    data = b"".join(encoded.chunks)
    short = make_batch(64, 768)
    short_bytes = (
        encode(pack(short, ranks=1, micro_batch_tokens=8192), 0, run_id="bench").nbytes / short.tokens
    )
    mb = len(data) / 1e6
    size = f"{mb:.1f} MB for {batch.tokens / 1e6:.1f} M tokens, prompts, header and padding included"

    def row(name: str, value: float, unit: str, target: float | None, note: str) -> dict[str, Any]:
        ok = None if target is None else value <= target
        return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "note": note}

    per_token = len(data) / batch.tokens
    encode_ms, decode_ms = cpu_ms(lambda: encode(packed, 0, run_id="bench")), cpu_ms(lambda: decode(data))
    return [
        row("wire_bytes_per_token", per_token, "B", 10, size),
        row("wire_bytes_per_token_short", short_bytes, "B", 10, "64 samples of 768 tokens"),
        row("wire_encode_ms", encode_ms, "ms", None, f"CPU, {mb:.1f} MB, digest included"),
        row("wire_decode_ms", decode_ms, "ms", None, f"CPU, {mb:.1f} MB, digest checked"),
    ]
