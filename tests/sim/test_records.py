"""Records without contents: all but the ids and logprobs is what the production code makes of a real record."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.samples import RecordRefused, build_samples
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.task import TaskRef
from paceline.sim.records import blank_ids, blank_logprobs, blank_samples


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    turns = []
    for number in range(draw(st.integers(1, 4))):
        counts = draw(st.lists(st.integers(1, 30), max_size=3))
        tokens = sum(counts)
        versions = tuple((number + n, count) for n, count in enumerate(counts))
        extends = number > 0 and draw(st.booleans())
        prompt = draw(st.integers(0 if extends else 1, 20))
        after = draw(st.integers(-1, number - 1)) if extends else -1
        ids, logprobs = blank_ids(tokens), blank_logprobs(tokens)
        turns.append(Turn(blank_ids(prompt), ids, logprobs, versions, extends, "stop", after=after))
    return Rollout(
        id=RolloutId(3, 1), task=TaskRef("env", "train", 7), outcome=COMPLETED, turns=tuple(turns), reward=0.5
    )


@given(rollouts(), st.integers(4, 150), st.sampled_from(["cut", "drop"]))
@settings(deadline=None, max_examples=300)
def test_blank_samples_are_those_of_the_production_code_but_for_contents(
    rollout: Rollout, seq_len: int, overlong: str
) -> None:
    try:
        real = build_samples(rollout, seq_len=seq_len, overlong=overlong)
    except RecordRefused as refused:
        with pytest.raises(RecordRefused, match=re.escape(str(refused))):
            blank_samples(rollout, seq_len=seq_len, overlong=overlong)
        return
    mine = blank_samples(rollout, seq_len=seq_len, overlong=overlong)
    for name in ("ending", "generated_tokens", "prefix_breaks", "cut_tokens"):
        assert getattr(mine, name) == getattr(real, name)
    assert bool(mine.overlong) == bool(real.overlong)
    assert len(mine.samples) == len(real.samples)
    for a, b in zip(mine.samples, real.samples, strict=True):
        assert np.array_equal(a.trainable, b.trainable)
        for name in (
            "versions",
            "rollout",
            "env",
            "task_index",
            "ending",
            "reward",
            "temperature",
            "cut_tokens",
        ):
            assert getattr(a, name) == getattr(b, name)
        for name in ("token_ids", "logprobs"):
            left, right = getattr(a, name), getattr(b, name)
            assert (len(left), left.dtype, left.flags.writeable) == (len(right), right.dtype, False)


def test_a_long_record_costs_no_memory() -> None:
    long = blank_ids(100_000)
    assert long.base is not None
    assert np.shares_memory(long, blank_ids(50_000))
