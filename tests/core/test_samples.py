"""Turns become token-exact samples."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import TRUNCATED, rollout, turn

from paceline.core.samples import Built, RecordRefused, build_samples
from paceline.domain.rollout import Rollout, Turn


def build(*turns: Turn, seq_len: int = 64, overlong: Any = "cut", **more: Any) -> Built:
    return build_samples(rollout(*turns, **more), seq_len=seq_len, overlong=overlong)


def refusal(*turns: Turn, **more: Any) -> RecordRefused:
    with pytest.raises(RecordRefused) as caught:
        build(*turns, **more)
    return caught.value


def test_s16_a_redrawn_rollout_holds_only_the_tokens_of_its_own_attempt() -> None:
    # The attempt under version 2 has a record of its own, cancelled, which no group closes with.
    again = build(turn([1, 2, 3], [7, 8, 9], versions=((4, 3),)))
    assert again.samples[0].versions == ((4, 3),)
    assert again.samples[0].token_ids.tolist() == [1, 2, 3, 7, 8, 9]


def test_s17_versions_of_a_sample_are_those_of_its_sampled_tokens() -> None:
    (sample,) = build(
        turn([1, 2, 3], [4, 5, 6], versions=((4, 3),)), turn([7, 8], [9, 10], versions=((5, 2),))
    ).samples
    assert sample.versions == ((4, 3), (5, 2))
    assert sample.oldest_version == 4
    assert sample.trainable_tokens == 5 == sample.trainable.sum()


def test_s17_a_rollout_without_a_sampled_token_is_empty_not_a_crash() -> None:
    nothing = rollout(turn([1, 2], []))
    assert nothing.oldest_version is None
    assert refusal(*nothing.turns).cause == "empty"


def test_s19_three_growing_turns_make_one_sample() -> None:
    (sample,) = build(
        turn([1, 2], [3], [-0.1]), turn([4], [5, 6], [-0.2, -0.3]), turn([7], [8], [-0.4])
    ).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.trainable.tolist() == [False, False, True, False, True, True, False, True]
    assert sample.logprobs.tolist() == pytest.approx([0, 0, -0.1, 0, -0.2, -0.3, 0, -0.4])
    assert len(sample.token_ids) == len(sample.trainable) == len(sample.logprobs)
    assert not any(a.flags.writeable for a in (sample.token_ids, sample.trainable, sample.logprobs))


def test_s20_a_broken_prefix_starts_a_new_sample() -> None:
    built = build(turn([1, 2], [3, 4]), turn([1, 2, 9], [5], extends=False), turn([6], [7]))
    assert [sample.token_ids.tolist() for sample in built.samples] == [[1, 2, 3, 4], [1, 2, 9, 5, 6, 7]]
    assert [sample.trainable.astype(int).tolist() for sample in built.samples] == [
        [0, 0, 1, 1],
        [0, 0, 0, 1, 0, 1],
    ]
    assert built.prefix_breaks == 1


def test_s25_a_sampled_end_token_keeps_its_logprob_and_an_added_one_is_masked() -> None:
    end = 99
    (sampled,) = build(turn([1], [5, end], [-0.5, -3.912])).samples
    assert sampled.trainable[-1]
    assert sampled.logprobs[-1] == pytest.approx(-3.912)
    # The template adds END before the next turn: it is prompt, and not trainable.
    (added,) = build(turn([1], [5]), turn([end, 2], [6])).samples
    assert added.token_ids.tolist() == [1, 5, end, 2, 6]
    assert not added.trainable[2]


def test_s28_temperature_travels_with_the_sample() -> None:
    assert build(temperature=0.6).samples[0].temperature == 0.6


@pytest.mark.parametrize("logprobs", [None, [-0.1]])
def test_s29_missing_or_short_logprobs_refuse_the_record(logprobs: Any) -> None:
    broken = msgspec.structs.replace(
        turn([1], [2, 3]), logprobs=None if logprobs is None else np.array(logprobs, np.float32)
    )
    refused = refusal(broken)
    assert refused.cause == "data"
    assert "logprobs" in str(refused)


def test_s37_a_turn_that_hit_its_token_limit_keeps_the_ending_its_environment_gave() -> None:
    cut_short = build(turn([1], [2, 3], finish="length"), outcome=TRUNCATED)
    assert cut_short.ending == "truncated"
    assert build(turn([1], [2, 3]), seq_len=3).ending == "completed"  # as long as allowed is not too long


def test_s38_cutting_makes_a_rollout_truncated() -> None:
    long = turn([0], list(range(1, 12)))
    built = build(long, seq_len=8)
    (sample,) = built.samples
    assert sample.token_ids.tolist() == list(range(8))
    assert len(sample.trainable) == len(sample.logprobs) == 8
    assert built.ending == sample.ending == "truncated"
    assert (built.generated_tokens, built.cut_tokens, sample.cut_tokens, sample.trainable_tokens) == (
        11,
        4,
        4,
        7,
    )


def test_s38_dropping_keeps_the_whole_rollout_out_and_says_why() -> None:
    built = build(turn([0], [1]), turn([0], list(range(1, 12)), extends=False), seq_len=8, overlong="drop")
    assert built.samples == ()
    assert built.ending == "completed"
    assert "12 tokens" in built.overlong
    assert "8" in built.overlong


def test_s45_a_sample_that_loses_every_sampled_token_to_the_cut_is_not_shipped() -> None:
    built = build(turn([0], [1, 2]), turn(list(range(8)), [1, 2, 3], extends=False), seq_len=8)
    assert [sample.token_ids.tolist() for sample in built.samples] == [[0, 1, 2]]
    assert built.cut_tokens == 3
    assert not built.overlong
    assert build(turn(list(range(8)), [1]), seq_len=8).overlong


def test_s45_a_branch_without_sampled_tokens_is_not_shipped() -> None:
    built = build(turn([0], [1]), turn(list(range(20)), [], extends=False))
    assert len(built.samples) == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), float("inf"), 0.3, -9999.0])
def test_s89_a_logprob_that_is_none_is_refused_with_its_place_and_value(wrong: float) -> None:
    refused = refusal(turn([1], [2]), turn([3], [4, 5, 6], [-0.1, wrong, -0.2]))
    assert refused.cause == "data"
    assert f"turn 2, sampled token 1: logprob {wrong:g}" in str(refused)


def test_s89_a_logprob_that_rounding_lifted_above_zero_is_kept() -> None:
    assert build(turn([1], [2], [5e-5])).samples[0].logprobs[1] == np.float32(5e-5)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (turn([1, -7], [2]), "prompt token 1: id -7"),
        (turn([1], [2, -7]), "sampled token 1: id -7"),
        (turn([1], [2, 3], versions=((0, 1),)), "add up to 1"),
        (turn([1], [2, 3], versions=((0, 3), (1, -1))), "version run (1, -1)"),
        (turn([1], [2], versions=((-1, 1),)), "version run (-1, 1)"),
        (turn([], [2]), "empty prompt"),
    ],
)
def test_a_record_that_does_not_add_up_is_refused(broken: Turn, says: str) -> None:
    refused = refusal(broken)
    assert refused.cause == "data"
    assert says in str(refused)


def test_a_turn_that_begins_anew_with_nothing_is_refused() -> None:
    assert "turn 2 has an empty prompt" in str(refusal(turn([1], [2]), turn([], [], extends=False)))


def test_turn_rewards_that_do_not_fit_the_turns_are_refused() -> None:
    assert "turn_rewards" in str(refusal(turn_rewards=(0.5, 1.0, 2.0, 3.0)))
    assert "turn_rewards" in str(refusal(turn_rewards=(float("nan"),)))


def test_lists_and_other_dtypes_become_the_arrays_that_samples_hold() -> None:
    loose: Any = msgspec.structs.replace(
        turn([1], [2, 3]), prompt_ids=[1], sampled_ids=np.array([2, 3], np.int64), logprobs=[-1.0, -2.0]
    )
    (sample,) = build(loose).samples
    assert sample.token_ids.dtype == np.int32
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.tolist() == [0.0, -1.0, -2.0]
    wrong: Any = msgspec.structs.replace(turn([1], [2]), sampled_ids=np.array([2.5]))
    assert "flat list of token ids" in str(refusal(wrong))
    large: Any = msgspec.structs.replace(turn([1], [2]), sampled_ids=np.array([2**40]))
    assert "int32" in str(refusal(large))


TURNS = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(TURNS, st.integers(2, 30))
def test_every_sampled_token_is_trainable_exactly_once_or_counted_as_cut(
    shapes: list[tuple[int, list[tuple[int, int]], bool]], seq_len: int
) -> None:
    made: list[Turn] = []
    fresh = 1000
    for prompt, runs, extends in shapes:
        sampled = sum(n for _, n in runs)
        made.append(
            turn(
                [0] * prompt,
                list(range(fresh, fresh + sampled)),
                extends=extends,
                versions=tuple(runs),
            )
        )
        fresh += sampled
    record: Rollout = rollout(*made)
    if fresh == 1000:
        assert refusal(*made).cause == "empty"
        return
    built = build_samples(record, seq_len=seq_len, overlong="cut")
    trained = [int(t) for s in built.samples for t in s.token_ids[s.trainable]]
    assert len(set(trained)) == len(trained)
    assert len(trained) + built.cut_tokens == built.generated_tokens == fresh - 1000
    by_token = {t: v for shape in made for t, v in _versions(shape)}
    for sample in built.samples:
        assert sample.tokens <= seq_len
        assert sample.trainable_tokens == int(sample.trainable.sum()) > 0
        assert all(n > 0 for _, n in sample.versions)
        expected = [by_token[int(t)] for t in sample.token_ids[sample.trainable]]
        assert [v for v, n in sample.versions for _ in range(n)] == expected
        assert (sample.logprobs[~sample.trainable] == 0).all()


def _versions(made: Turn) -> list[tuple[int, int]]:
    flat = [v for v, n in made.versions for _ in range(n)]
    return list(zip(made.sampled_ids.tolist(), flat, strict=True))
