"""Micro-batches: what the trainer is given, the check at its door, and the way from packed to padded.

A micro-batch holds sequences packed back to back. A model that is not told where one ends would attend across
the border, and how to tell it differs from model to model. So sequences are unpacked to rows padded on the
right, which every causal model computes rightly without a mask: no token sees what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import TrainerError

_SHORTEST_SHARE = 0.7
"""Rows shorter than this share of the longest go to a block of their own, so padding stays below 30%."""

_LIKELIHOOD = "likelihood_weights"

_BLOCK_TOKENS = 16_384
"""Most tokens of a block, padding included, unless one sequence alone has more."""


class MicroBatch(Protocol):
    """Sequences packed back to back. Arrays have length N, the sum of `lengths`."""

    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def trainable(self) -> NDArray[np.bool_]:
        """False on prompt, tool and padding tokens. Never True on a sequence's first token."""
        ...

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Natural log, of the distribution the token was sampled from, given what precedes it."""
        ...

    @property
    def advantages(self) -> NDArray[np.float32]: ...
    @property
    def temperatures(self) -> NDArray[np.float32]:
        """What the logits were divided by when the token was sampled."""
        ...

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[S]: tokens of each sequence."""
        ...

    @property
    def streams(self) -> Mapping[str, NDArray[Any]]:
        """Optional arrays [N]. `loss_weights`, `ref_logprobs` and `likelihood_weights` are used; others are ignored."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the loss needs of T trainable tokens. Tensors have length T, in the order of the logits."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    temperatures: torch.Tensor
    weights: torch.Tensor
    """What each token's loss is multiplied by; 1 where no `loss_weights` came."""
    ref_logprobs: torch.Tensor | None
    likelihood: torch.Tensor | None = None
    """Weight of the log-likelihood of each token that was not sampled and is learnt all the same; 0 on those that were
    sampled. None where there are none."""

    def only(self, chosen: torch.Tensor) -> Tokens:
        """Those where `chosen`, bool[T], is true."""
        reference = None if self.ref_logprobs is None else self.ref_logprobs[chosen]
        return Tokens(
            ids=self.ids[chosen],
            logprobs=self.logprobs[chosen],
            advantages=self.advantages[chosen],
            temperatures=self.temperatures[chosen],
            weights=self.weights[chosen],
            ref_logprobs=reference,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of about the same length, for one forward and backward pass."""

    token_ids: torch.Tensor
    """int64[rows, width], padded on the right."""
    predicts: torch.Tensor
    """bool[rows, width]: where the logits predict a trainable token, one before the token itself."""
    tokens: Tokens
    """The trainable tokens, row by row."""


def check(micro_batches: Sequence[MicroBatch]) -> int:
    """The number of trainable tokens. TrainerError, naming the position, if a micro-batch cannot be trained on."""
    trainable_tokens = 0
    for number, micro_batch in enumerate(micro_batches):
        _check_shapes(number, micro_batch)
        trainable = micro_batch.trainable
        starts = np.cumsum(micro_batch.lengths) - micro_batch.lengths
        _refuse(
            number,
            trainable[starts],
            starts,
            "nothing precedes a sequence's first token: it cannot be trainable",
        )
        positions = np.flatnonzero(trainable)
        named = {"logprobs": micro_batch.logprobs, "advantages": micro_batch.advantages}
        for name in ("loss_weights", "ref_logprobs"):
            if name in micro_batch.streams:
                named[name] = micro_batch.streams[name]
        for name, values in named.items():
            _refuse(number, ~np.isfinite(values[positions]), positions, f"{name} is not finite")
        _refuse(
            number, micro_batch.logprobs[positions] > 1e-3, positions, "logprobs is above 0: no probability"
        )
        if _LIKELIHOOD in micro_batch.streams:
            weights = micro_batch.streams[_LIKELIHOOD]
            everywhere = np.arange(len(weights))
            _refuse(
                number, ~(np.isfinite(weights) & (weights >= 0)), everywhere, f"{_LIKELIHOOD} is no weight"
            )
            _refuse(number, (weights > 0) & trainable, everywhere, f"{_LIKELIHOOD} is set on a sampled token")
            _refuse(
                number,
                weights[starts] > 0,
                starts,
                "nothing precedes a sequence's first token: nothing predicts it",
            )
        temperatures = micro_batch.temperatures[positions]
        _refuse(
            number, ~((temperatures > 0) & np.isfinite(temperatures)), positions, "temperature is not above 0"
        )
        trainable_tokens += len(positions)
    if not trainable_tokens:
        raise TrainerError(
            f"{len(micro_batches)} micro-batches hold no trainable token: there is nothing to step on"
        )
    return trainable_tokens


def blocks(micro_batch: MicroBatch) -> Iterator[Block]:
    """The sequences of `micro_batch` that train anything, longest first, in blocks of similar lengths."""
    lengths = micro_batch.lengths
    if not len(lengths):
        return
    starts = np.cumsum(lengths) - lengths
    trains = np.add.reduceat(micro_batch.trainable.astype(np.int64), starts) > 0
    order = [int(s) for s in np.argsort(-lengths, kind="stable") if trains[s]]
    while order:
        width = int(lengths[order[0]])
        most = max(1, _BLOCK_TOKENS // width)
        count = 1
        while count < min(most, len(order)) and lengths[order[count]] >= _SHORTEST_SHARE * width:
            count += 1
        yield _block(micro_batch, [(int(starts[s]), int(lengths[s])) for s in order[:count]])
        del order[:count]


def _block(micro_batch: MicroBatch, spans: list[tuple[int, int]]) -> Block:
    width = spans[0][1]
    source = np.full((len(spans), width), -1, dtype=np.int64)
    for row, (start, length) in enumerate(spans):
        source[row, :length] = np.arange(start, start + length)
    is_real = source >= 0
    learnt = micro_batch.trainable
    likelihood = micro_batch.streams.get(_LIKELIHOOD)
    if likelihood is not None:
        learnt = learnt | (likelihood > 0)
    trainable = learnt[source] & is_real
    at = source[trainable]
    predicts = np.zeros_like(trainable)
    predicts[:, :-1] = trainable[:, 1:]
    streams = micro_batch.streams
    return Block(
        token_ids=torch.from_numpy(np.where(is_real, micro_batch.token_ids[source], 0).astype(np.int64)),
        predicts=torch.from_numpy(predicts),
        tokens=Tokens(
            ids=torch.from_numpy(micro_batch.token_ids[at].astype(np.int64)),
            logprobs=_floats(micro_batch.logprobs[at]),
            advantages=_floats(micro_batch.advantages[at]),
            temperatures=_floats(micro_batch.temperatures[at]),
            weights=_floats(streams["loss_weights"][at])
            if "loss_weights" in streams
            else torch.ones(len(at)),
            ref_logprobs=_floats(streams["ref_logprobs"][at]) if "ref_logprobs" in streams else None,
            likelihood=None if likelihood is None else _floats(likelihood[at]),
        ),
    )


def _floats(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _check_shapes(number: int, micro_batch: MicroBatch) -> None:
    total = int(micro_batch.lengths.sum())
    if len(micro_batch.lengths) and int(micro_batch.lengths.min()) < 1:
        raise TrainerError(
            f"micro-batch {number} holds an empty sequence: lengths {micro_batch.lengths.tolist()[:8]}"
        )
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": micro_batch.token_ids,
        "trainable": micro_batch.trainable,
        "logprobs": micro_batch.logprobs,
        "advantages": micro_batch.advantages,
        "temperatures": micro_batch.temperatures,
        **micro_batch.streams,
    }
    for name, array in arrays.items():
        if len(array) != total:
            raise TrainerError(
                f"micro-batch {number}: {name} has {len(array)} entries, its sequences {total} tokens"
            )


def _refuse(number: int, wrong: NDArray[np.bool_], positions: NDArray[np.int64], why: str) -> None:
    if wrong.any():
        raise TrainerError(f"micro-batch {number}, token {positions[wrong.argmax()]}: {why}")
