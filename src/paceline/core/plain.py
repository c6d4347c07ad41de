"""Samples as plain data that msgpack can write, for checkpoints of the batch list."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EnvName, RolloutId
from paceline.domain.sample import Sample

_PLAIN = ("task_index", "ending", "reward", "temperature", "cut_tokens")


def to_plain(sample: Sample) -> dict[str, Any]:
    """Everything but the rollout's id and its environment, which the caller keeps once for all its samples.

    Arrays are views, not copies: they never change, and a batch list of millions of tokens is copied off the loop, when
    it is encoded.
    """
    advantage = sample.advantage
    return {
        **{name: getattr(sample, name) for name in _PLAIN},
        "token_ids": _bytes(sample.token_ids),
        "trainable": _bytes(sample.trainable),
        "logprobs": _bytes(sample.logprobs),
        "versions": [list(run) for run in sample.versions],
        "advantage": _bytes(advantage) if isinstance(advantage, np.ndarray) else advantage,
        "streams": {name: _bytes(stream) for name, stream in sample.streams.items()},
    }


def from_plain(rollout: RolloutId, env: EnvName, data: dict[str, Any]) -> Sample:
    """The inverse of `to_plain`."""
    advantage = data["advantage"]
    return Sample(
        rollout=rollout,
        env=env,
        **{name: data[name] for name in _PLAIN},
        token_ids=_array(data["token_ids"]),
        trainable=_array(data["trainable"]),
        logprobs=_array(data["logprobs"]),
        versions=tuple([(version, count) for version, count in data["versions"]]),
        advantage=advantage if isinstance(advantage, float | int) else _array(advantage),
        streams={name: _array(stream) for name, stream in data["streams"].items()},
    )


def _bytes(array: NDArray[Any]) -> list[Any]:
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return [plain.dtype.str, list(array.shape), plain.reshape(-1).view(np.uint8).data]


def _array(data: list[Any]) -> NDArray[Any]:
    """Read-only, since the bytes are."""
    dtype, shape, raw = data
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
