"""Batches: what one optimizer step trains on, and the packed form that is shipped."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import RolloutId, Version
from paceline.domain.mostly_constant import MostlyConstant
from paceline.domain.sample import Sample, Stream


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What the trainer's step `step` trains on. It trains v(step-1) and makes v(step)."""

    step: int
    samples: tuple[Sample, ...]
    rollouts: tuple[RolloutId, ...]

    @property
    def trains(self) -> Version:
        return self.step - 1

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


class MicroBatch(msgspec.Struct, frozen=True, gc=False):
    """Sequences packed back to back: one forward and backward pass of one data-parallel rank.

    Arrays have length N, the sum of `lengths`. Padding is a sequence of its own, at the end, with
    `trainable` False everywhere and no entry in `sample_index`.
    """

    token_ids: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantage: MostlyConstant
    """0 on tokens that do not train."""
    temperature: MostlyConstant
    lengths: NDArray[np.int32]
    """int32[S]: tokens of each sequence, padding included."""
    sample_index: NDArray[np.int32]
    """int32[<=S]: which sample of the batch each sequence is."""
    streams: dict[str, Stream] = {}

    @property
    def advantages(self) -> NDArray[np.float32]:
        """One number a token, made anew at each call: ship `advantage`."""
        return self.advantage.expanded(self.lengths, self.trainable)

    @property
    def temperatures(self) -> NDArray[np.float32]:
        """One number a token, made anew at each call: ship `temperature`."""
        return self.temperature.expanded(self.lengths, self.trainable)


class PackedBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch cut for N data-parallel ranks. Every rank holds the same number of micro-batches."""

    batch: Batch
    ranks: tuple[tuple[MicroBatch, ...], ...]
