"""What filters see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import rollout, sample, turn

from paceline.config.filters import GibberishFilter, LengthFilter, RepetitionFilter
from paceline.core.filters import detect, gibberish, has_signal, length, repetition

REPETITION = RepetitionFilter(type="repetition", window=12, max_period=4)
GIBBERISH = GibberishFilter(type="gibberish", window=4, logprob=-8)


def ids(*values: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    return [np.array(values, np.int32)]


@pytest.mark.parametrize(
    ("advantage", "kept", "kept_at_zero"),
    [(0, False, False), (0.05, False, True), (-0.05, False, True), (0.051, True, True), (-0.2, True, True)],
)
def test_s41_the_threshold_is_inside_the_band_on_both_sides(
    advantage: float, kept: bool, kept_at_zero: bool
) -> None:
    assert has_signal([sample(advantage=advantage)], 0.05) is kept
    assert has_signal([sample(advantage=advantage)], 0.0) is kept_at_zero


def test_s41_per_token_advantages_need_one_trainable_token_outside_the_band() -> None:
    inside = np.array([9.0, 0.05, -0.05, 0.0], np.float32)  # the 9 is on a prompt token
    outside = np.array([0.0, 0.05, -0.06, 0.0], np.float32)
    assert not has_signal([sample(advantage=inside)], 0.05)
    assert has_signal([sample(advantage=inside), sample(advantage=outside)], 0.05)


def test_s41_a_difference_that_rounding_lifted_over_the_threshold_is_not_over_it() -> None:
    assert 0.55 - 0.5 > 0.05
    assert not has_signal([sample(advantage=0.55 - 0.5)], 0.05)


def test_repetition_needs_a_full_window_of_one_short_period() -> None:
    assert repetition(REPETITION, ids(1, 2, 3, *[7, 8, 9] * 4)) is not None
    assert repetition(REPETITION, ids(1, 2, *[7, 8, 9] * 3, 7, 8, 1)) is None  # 11 of 12
    assert repetition(REPETITION, ids(*[5] * 12)) is not None
    assert repetition(REPETITION, ids(*[1, 2, 3, 4, 5] * 5)) is None  # period 5, past max_period


def test_repetition_does_not_count_across_turns() -> None:
    assert repetition(REPETITION, ids(*[5] * 8) * 3) is None


def test_gibberish_is_a_window_of_very_unlikely_tokens() -> None:
    def seen(*logprobs: float) -> str | None:
        return gibberish(GIBBERISH, [np.array(logprobs, np.float32)])

    assert seen(-0.1, -9, -9, -9, -9, -0.1) is not None
    assert seen(-9, -9, -9, -0.1, -9, -9, -9) is None
    assert seen(-9, -9) is not None  # shorter than the window: judged by all of it
    assert seen() is None


def test_length_counts_sampled_tokens() -> None:
    rule = LengthFilter(type="length", min_tokens=2, max_tokens=3)
    assert [length(rule, n) is None for n in (1, 2, 3, 4)] == [False, True, True, False]


def test_s42_filters_that_only_count_flag_all_the_same() -> None:
    rules = (LengthFilter(type="length", min_tokens=2, enforce=False), GIBBERISH)
    flags = detect(rules, rollout(turn([1], [2], [-9.0])))
    assert [(flag.filter, flag.enforce) for flag in flags] == [("length", False), ("gibberish", True)]
    assert detect(rules, rollout(turn([1], [2, 3]))) == ()


def _loops(tokens: list[int], window: int, max_period: int) -> bool:
    for start in range(len(tokens) - window + 1):
        stretch = tokens[start : start + window]
        for period in range(1, min(max_period, window // 2) + 1):
            if all(stretch[i] == stretch[i - period] for i in range(period, window)):
                return True
    return False


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 9)), max_size=6),
    st.integers(4, 24),
    st.integers(1, 12),
)
def test_repetition_agrees_with_the_definition(
    pieces: list[tuple[list[int], int]], window: int, max_period: int
) -> None:
    tokens = [token for piece, times in pieces for token in piece * times]
    rule = RepetitionFilter(type="repetition", window=window, max_period=max_period)
    assert (repetition(rule, ids(*tokens)) is not None) == _loops(tokens, window, max_period)


@settings(deadline=None)
@given(st.lists(st.floats(-20, 0, width=32), max_size=40), st.integers(1, 12))
def test_gibberish_agrees_with_the_definition(logprobs: list[float], window: int) -> None:
    rule = GibberishFilter(type="gibberish", window=window, logprob=-8)
    size = min(window, len(logprobs))
    means = [sum(logprobs[i : i + size]) / size for i in range(len(logprobs) - size + 1)] if size else []
    if any(abs(mean + 8) < 1e-9 for mean in means):
        return
    assert (gibberish(rule, [np.array(logprobs, np.float32)]) is not None) == any(m < -8 for m in means)
