"""Records without contents: a token array is a view of one block of zeros, so its length costs nothing.

Everything else of a rollout and of its samples is exact: lengths, masks, versions, endings. `tests/sim/test_records.py`
holds `blank_samples` against the production code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.samples import Built, RecordRefused, build_samples, first_runs, join_runs
from paceline.domain.rollout import Rollout, Turn, VersionRuns
from paceline.domain.sample import Sample

_FIRST = 1 << 17
"""Tokens of the first block; a longer array makes a larger one."""


class _Blocks:
    """Zeros, and a mask that is false in its first half and true in its second."""

    def __init__(self) -> None:
        self.make(_FIRST)

    def make(self, size: int) -> None:
        self.size = size
        self.ids = _frozen(np.zeros(size, np.int32))
        self.logprobs = _frozen(np.zeros(size, np.float32))
        mask = np.zeros(2 * size, np.bool_)
        mask[size:] = True
        self.mask = _frozen(mask)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


_BLOCKS = _Blocks()


def blank_ids(count: int) -> NDArray[np.int32]:
    """int32[count]: ids that do not exist."""
    if count > _BLOCKS.size:
        _BLOCKS.make(2 * count)
    return _BLOCKS.ids[:count]


def blank_logprobs(count: int) -> NDArray[np.float32]:
    """float32[count], all zero, which is the logprob of a token that was certain."""
    if count > _BLOCKS.size:
        _BLOCKS.make(2 * count)
    return _BLOCKS.logprobs[:count]


def _mask_of(spans: Sequence[tuple[int, int]], length: int) -> NDArray[np.bool_]:
    """bool[length], true in the spans. One span at the end, which is a single turn, costs nothing."""
    first, last = spans[0]
    if len(spans) == 1 and last == length:
        if length > _BLOCKS.size:
            _BLOCKS.make(2 * length)
        start = _BLOCKS.size - first
        return _BLOCKS.mask[start : start + length]
    mask = np.zeros(length, np.bool_)
    for start, end in spans:
        mask[start:end] = True
    mask.setflags(write=False)
    return mask


def blank_samples(rollout: Rollout, *, seq_len: int, overlong: Literal["cut", "drop"]) -> Built:
    """What `core.samples.build_samples` makes of a record, for records whose arrays are blank."""
    turns = rollout.turns
    generated = 0
    for turn in turns:
        generated += len(turn.sampled_ids)
        if turn.after >= 0:  # it went back, which is rare, and makes samples that share their beginning
            return build_samples(rollout, seq_len=seq_len, overlong=overlong)
    if not generated:
        raise RecordRefused("empty", f"{len(turns)} turns sampled no token")
    starts = [i for i, turn in enumerate(turns) if not turn.extends or not i]
    stops = [*starts[1:], len(turns)]
    whole = [_measured(turns[first:stop]) for first, stop in zip(starts, stops, strict=True)]
    longest = max([length for length, _, _ in whole])
    ending, cut_tokens, why = rollout.outcome.ending, 0, ""
    samples: list[Sample] = []
    if longest > seq_len and overlong == "drop":
        why = f"a sample of {longest} tokens is longer than seq_len {seq_len}"
    else:
        if longest > seq_len:
            ending = "truncated"
        for length, spans, versions in whole:
            lost = 0
            if length > seq_len:
                kept = [(start, min(end, seq_len)) for start, end in spans if start < seq_len]
                lost = sum([n for _, n in versions]) - sum([end - start for start, end in kept])
                length, spans = seq_len, kept
                versions = first_runs(versions, sum([end - start for start, end in kept]))
                cut_tokens += lost
            if versions:
                samples.append(
                    Sample(
                        token_ids=blank_ids(length),
                        trainable=_mask_of(spans, length),
                        logprobs=blank_logprobs(length),
                        versions=versions,
                        rollout=rollout.id,
                        env=rollout.task.env,
                        task_index=rollout.task.index,
                        ending=ending,
                        reward=0.0 if rollout.reward is None else float(rollout.reward),
                        temperature=rollout.temperature,
                        cut_tokens=lost,
                    )
                )
        if longest > seq_len and cut_tokens == generated:
            why = f"no sampled token lies within the first {seq_len} tokens of a sample"
    return Built(
        samples=tuple(samples),
        ending=ending,
        generated_tokens=generated,
        prefix_breaks=len(starts) - 1,
        cut_tokens=cut_tokens,
        overlong=why,
    )


def _measured(turns: Sequence[Turn]) -> tuple[int, list[tuple[int, int]], VersionRuns]:
    """Length, spans of sampled tokens, and versions of the sample that these turns make."""
    if len(turns) == 1:
        turn = turns[0]
        start = len(turn.prompt_ids)
        end = start + len(turn.sampled_ids)
        return end, [(start, end)], turn.versions
    at = 0
    spans: list[tuple[int, int]] = []
    for turn in turns:
        start = at + len(turn.prompt_ids)
        at = start + len(turn.sampled_ids)
        if at > start:
            spans.append((start, at))
    return at, spans, join_runs(turns)
