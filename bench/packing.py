"""How long packing takes, and how evenly it loads the ranks: 768 micro-batches over 64 data-parallel ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paceline.core.packing import balance, pack
from paceline.domain.batch import Batch, PackedBatch
from paceline.domain.ids import RolloutId
from paceline.domain.sample import Sample

RANKS = 64
MICRO_BATCHES = 768
MICRO_BATCH_TOKENS = 8192


def make_batch(seed: int = 0) -> Batch:
    """Samples of log-normal length, as rollouts have, that fill a little less than the micro-batches asked for."""
    noise = np.random.default_rng(seed)
    samples: list[Sample] = []
    room = int(MICRO_BATCHES * MICRO_BATCH_TOKENS * 0.985)
    while True:
        tokens = int(np.clip(noise.lognormal(7.2, 0.9), 64, MICRO_BATCH_TOKENS))
        room -= tokens
        if room < 0:
            break
        prompt = tokens // 4
        trainable = np.zeros(tokens, np.bool_)
        trainable[prompt:] = True
        samples.append(
            Sample(
                token_ids=np.arange(tokens, dtype=np.int32),
                trainable=trainable,
                logprobs=np.where(trainable, np.float32(-0.5), np.float32(0)),
                versions=((0, tokens - prompt),),
                rollout=RolloutId(len(samples) // 8, len(samples) % 8),
                env="bench",
                task_index=0,
                ending="completed",
                reward=1.0,
                temperature=1.0,
                advantage=0.5,
            )
        )
    return Batch(1, tuple(samples), tuple(sample.rollout for sample in samples))


def rows() -> list[dict[str, Any]]:
    """Best of three, since a shared machine adds time and never takes any away."""
    batch = make_batch()
    seconds: list[float] = []
    packed = PackedBatch(batch, ())
    for _ in range(3):
        before = time.perf_counter()
        packed = pack(batch, ranks=RANKS, micro_batch_tokens=MICRO_BATCH_TOKENS)
        seconds.append(time.perf_counter() - before)
    made = sum(len(rank) for rank in packed.ranks)
    note = f"{len(batch.samples)} samples, {batch.tokens / 1e6:.1f} M tokens, {made} micro-batches"
    ratio = balance(packed)
    return [
        {
            "name": "packing_768x64_s",
            "value": round(min(seconds), 4),
            "unit": "s",
            "target": 2.0,
            "ok": min(seconds) <= 2.0 and made == MICRO_BATCHES,
            "note": note,
        },
        {
            "name": "packing_768x64_balance",
            "value": round(ratio, 5),
            "unit": "dearest rank / mean",
            "target": 1.05,
            "ok": ratio <= 1.05,
            "note": "estimated cost, linear and quadratic in sequence length",
        },
    ]


if __name__ == "__main__":
    for row in rows():
        print(row)
