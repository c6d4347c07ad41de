"""Samples that the log tells of, built again from the rollout they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.samples import RecordRefused, build_samples, cut_sample
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample, Stream
from paceline.errors import CannotFold

Extras: TypeAlias = Mapping[int, tuple[NDArray[np.float32] | None, Mapping[str, Stream]]]
"""By number of the sample: its advantages, where they differ from token to token, and its streams."""


def rebuild(rollout: Rollout, told: Sequence[Sample], extras: Extras | None) -> tuple[Sample, ...]:
    """The samples as they were. `told` is what the log says of them, everything but their arrays.

    CannotFold when this code makes others of the rollout, or what the log does not hold is not in `extras`.
    """
    try:
        uncut = build_samples(
            rollout, seq_len=rollout.prompt_tokens + rollout.sampled_tokens, overlong="cut"
        ).samples
    except RecordRefused as refused:
        raise CannotFold(f"{rollout.id} was taken for sound, and is refused now: {refused}") from refused
    found: list[Sample] = []
    # Each was cut to the length that was asked for then, whatever that was; one of which nothing was left is not told.
    for new in uncut:
        said = told[len(found)] if len(found) < len(told) else None
        if said is not None and _shape(cut := cut_sample(new, said.tokens)) == _shape(said):
            found.append(_as_told(cut, said, len(found), extras))
    if len(found) < len(told):
        raise CannotFold(
            f"{rollout.id} was made into samples of {[s.tokens for s in told]} tokens, this release makes "
            f"{[s.tokens for s in uncut]} of it: go on with the release that wrote the journal"
        )
    return tuple(found)


def _as_told(new: Sample, said: Sample, number: int, extras: Extras | None) -> Sample:
    advantage, streams = said.advantage, said.streams
    if isinstance(advantage, np.ndarray) or streams:
        if extras is None or number not in extras:
            raise CannotFold(f"the advantages or streams of {new.rollout} are not in the rollout store")
        per_token, kept = extras[number]
        advantage = said.advantage if per_token is None else per_token
        streams = dict(kept)
    return msgspec.structs.replace(
        said,
        token_ids=new.token_ids,
        trainable=new.trainable,
        logprobs=new.logprobs,
        advantage=advantage,
        streams=streams,
    )


def _shape(sample: Sample) -> tuple[object, ...]:
    return sample.tokens, sample.versions, sample.cut_tokens
