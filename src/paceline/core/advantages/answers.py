"""An algorithm's answer, checked and put onto the samples it is for.

An algorithm may be a user's own, so its answer is an edge: shapes, dtypes and finiteness are checked here, and
trusted from here on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.advantages.base import Advantages, AlgorithmError, GroupView
from paceline.domain.sample import Sample, Stream

_STREAM_DTYPES = ("float32", "int32", "uint8")
_LARGEST = float(np.finfo(np.float32).max)


def attach(view: GroupView, answer: Advantages, algorithm: str) -> list[tuple[tuple[Sample, ...], float]]:
    """For each member of `view`, its samples with advantages and streams, and its (mean) advantage.

    AlgorithmError, naming the algorithm, when the answer does not fit the view or is not finite.
    """
    if not isinstance(answer, Advantages):
        raise AlgorithmError(f"{algorithm}: advantages() must return Advantages, not {type(answer).__name__}")
    values = answer.values
    if len(values) != len(view):
        raise AlgorithmError(f"{algorithm}: advantages for {len(values)} members, of {len(view)}")
    if isinstance(values, np.ndarray):
        done = _scalars(view, values, algorithm)
    else:
        done = [
            _per_token(samples, given, algorithm) for samples, given in zip(view.samples, values, strict=True)
        ]
    for name, given in answer.streams.items():
        if [len(arrays) for arrays in given] != [len(samples) for samples in view.samples]:
            raise AlgorithmError(
                f"{algorithm}: stream {name!r} is not shaped like the samples it was asked for"
            )
        done = [
            (_with_stream(samples, name, arrays, algorithm), advantage)
            for (samples, advantage), arrays in zip(done, given, strict=True)
        ]
    return done


def _scalars(
    view: GroupView, values: NDArray[np.float64], algorithm: str
) -> list[tuple[tuple[Sample, ...], float]]:
    if values.ndim != 1:
        raise AlgorithmError(f"{algorithm}: advantages of shape {values.shape}, for {len(view)} members")
    done: list[tuple[tuple[Sample, ...], float]] = []
    for rollout, samples, value in zip(view.rollouts, view.samples, values.tolist(), strict=True):
        if not abs(value) <= _LARGEST:  # false for NaN too
            raise AlgorithmError(f"{algorithm}: the advantage of {rollout.id} is {value}, no finite float32")
        done.append((tuple([msgspec.structs.replace(s, advantage=value) for s in samples]), value))
    return done


def _per_token(
    samples: Sequence[Sample], given: Sequence[NDArray[np.float32]], algorithm: str
) -> tuple[tuple[Sample, ...], float]:
    """0 where nothing trains; the number is the mean over what does."""
    if len(given) != len(samples):
        raise AlgorithmError(
            f"{algorithm}: advantages for {len(given)} samples of a rollout that has {len(samples)}"
        )
    total, count = 0.0, 0
    done: list[Sample] = []
    for sample, values in zip(samples, given, strict=True):
        if values.shape != (sample.tokens,):
            raise AlgorithmError(
                f"{algorithm}: advantages of shape {values.shape} for {sample.tokens} tokens of {sample.rollout}"
            )
        masked = np.where(sample.trainable, values, 0.0).astype(np.float32)
        finite = np.isfinite(masked)
        if not finite.all():
            place = int(finite.argmin())
            raise AlgorithmError(
                f"{algorithm}: the advantage of token {place} of {sample.rollout} is {values[place]}"
            )
        masked.setflags(write=False)
        total += float(masked.sum(dtype=np.float64))
        count += sample.trainable_tokens
        done.append(msgspec.structs.replace(sample, advantage=masked))
    return tuple(done), total / count if count else 0.0


def _with_stream(
    samples: Sequence[Sample], name: str, arrays: Sequence[Stream], algorithm: str
) -> tuple[Sample, ...]:
    done: list[Sample] = []
    for sample, array in zip(samples, arrays, strict=True):
        if len(array) != sample.tokens:
            raise AlgorithmError(
                f"{algorithm}: stream {name!r} has {len(array)} entries for {sample.tokens} tokens of {sample.rollout}"
            )
        if array.dtype.name not in _STREAM_DTYPES:
            raise AlgorithmError(
                f"{algorithm}: stream {name!r} is {array.dtype}, not one of {', '.join(_STREAM_DTYPES)}"
            )
        array.setflags(write=False)
        done.append(msgspec.structs.replace(sample, streams={**sample.streams, name: array}))
    return tuple(done)
