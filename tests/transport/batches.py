"""Batches for tests: any shape from a seed, packed as the wire expects them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.domain.batch import Batch, MicroBatch, PackedBatch
from paceline.domain.ids import RolloutId
from paceline.domain.mostly_constant import MostlyConstant
from paceline.domain.sample import Sample


def sample(
    rng: np.random.Generator,
    tokens: int,
    number: int,
    *,
    per_token: bool = False,
    streams: tuple[str, ...] = (),
) -> Sample:
    trainable = rng.random(tokens) < 0.7
    trainable[0] = False
    trained = int(trainable.sum())
    first = int(rng.integers(0, trained + 1))
    runs = tuple((v, n) for v, n in ((3, first), (4, trained - first)) if n)
    logprobs = np.where(trainable, -rng.random(tokens), 0).astype(np.float32)
    advantage: float | NDArray[np.float32] = float(rng.normal())
    if per_token:
        advantage = rng.normal(size=tokens).astype(np.float32)
    return Sample(
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        trainable=trainable,
        logprobs=logprobs,
        versions=runs,
        rollout=RolloutId(10 + number // 4, number % 4, number % 2),
        env="arithmetic" if number % 3 else "reverse-text",
        task_index=number * 7,
        ending="truncated" if number % 5 == 4 else "completed",
        reward=number / 8,
        temperature=1.0 if number % 2 else 0.7,
        advantage=advantage,
        streams={name: rng.random(tokens).astype(np.float32) for name in streams},
        cut_tokens=number % 2,
    )


def packed(
    seed: int,
    lengths: list[list[list[int]]],
    *,
    per_token: bool = False,
    masked: bool = False,
    streams: tuple[str, ...] = (),
    pad_to: int = 1,
    step: int = 5,
) -> PackedBatch:
    """`lengths[rank][micro_batch]` are the samples' lengths. `masked` puts 0 where nothing trains."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    ranks = []
    for rank in lengths:
        micro_batches = []
        for micro_batch in rank:
            first = len(samples)
            for number, tokens in enumerate(micro_batch):
                varies = per_token and number % 2 == 0
                samples.append(sample(rng, tokens, len(samples), per_token=varies, streams=streams))
            micro_batches.append(_micro_batch(samples[first:], first, masked, streams, pad_to))
        ranks.append(tuple(micro_batches))
    rollouts = tuple(s.rollout for s in samples)
    return PackedBatch(Batch(step=step, samples=tuple(samples), rollouts=rollouts), tuple(ranks))


def _micro_batch(
    samples: list[Sample], first: int, masked: bool, streams: tuple[str, ...], pad_to: int
) -> MicroBatch:
    lengths = [s.tokens for s in samples]
    pad = -sum(lengths) % pad_to

    def join(values: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
        return np.concatenate([*values, np.zeros(pad)]).astype(dtype)

    trainable = join([s.trainable for s in samples], np.bool_)
    advantages = join([np.broadcast_to(s.advantage, s.tokens) for s in samples], np.float32)
    if masked:
        advantages = np.where(trainable, advantages, np.float32(0))
    temperatures = join([np.full(s.tokens, s.temperature) for s in samples], np.float32)
    every = np.array([*lengths, pad] if pad else lengths, np.int32)
    return MicroBatch(
        token_ids=join([s.token_ids for s in samples], np.int32),
        trainable=trainable,
        logprobs=join([s.logprobs for s in samples], np.float32),
        advantage=MostlyConstant.of(advantages, every, trainable),
        temperature=MostlyConstant.of(temperatures, every, trainable),
        lengths=every,
        sample_index=np.arange(first, first + len(samples), dtype=np.int32),
        streams={name: join([s.streams[name] for s in samples], np.float32) for name in streams},
    )


def joined(chunks: list[Any]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)
