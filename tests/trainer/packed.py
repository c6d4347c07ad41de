"""Micro-batches for the trainer, from sequences one can also look at singly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 40


@dataclass(frozen=True)
class Packed:
    token_ids: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    lengths: NDArray[np.int32]
    streams: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """One sequence: `prompt` tokens that do not train, then tokens that do."""

    ids: NDArray[np.int32]
    prompt: int
    logprobs: NDArray[np.float32]
    advantage: float
    temperature: float


def random_sequences(seed: int, count: int = 7) -> list[Sampled]:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(rng.integers(3, 20))
        sequences.append(
            Sampled(
                ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                prompt=int(rng.integers(1, length)),
                logprobs=rng.uniform(-5, -2, length).astype(np.float32),
                advantage=float(rng.normal()),
                temperature=float(rng.choice([0.7, 1.0, 1.3])),
            )
        )
    return sequences


def pack(sequences: Sequence[Sampled], **streams: NDArray[Any]) -> Packed:
    lengths = np.array([len(s.ids) for s in sequences], np.int32)
    trainable = np.concatenate([np.arange(len(s.ids)) >= s.prompt for s in sequences])
    return Packed(
        token_ids=np.concatenate([s.ids for s in sequences]),
        trainable=trainable,
        logprobs=np.where(trainable, np.concatenate([s.logprobs for s in sequences]), 0).astype(np.float32),
        advantages=np.repeat(np.array([s.advantage for s in sequences], np.float32), lengths),
        temperatures=np.repeat(np.array([s.temperature for s in sequences], np.float32), lengths),
        lengths=lengths,
        streams=streams,
    )
