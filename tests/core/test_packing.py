"""Samples become micro-batches of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import sample

from paceline.core.packing import Cost, assign, balance, pack
from paceline.domain.batch import Batch, MicroBatch, PackedBatch
from paceline.domain.mostly_constant import MostlyConstant
from paceline.domain.sample import Sample
from paceline.errors import InvariantError


def batch(*samples: Sample) -> Batch:
    return Batch(1, samples, tuple(dict.fromkeys(each.rollout for each in samples)))


def micro_batches(packed: PackedBatch) -> list[MicroBatch]:
    return [each for rank in packed.ranks for each in rank]


def test_s28_every_token_carries_the_temperature_of_its_sample() -> None:
    packed = pack(
        batch(sample(3, temperature=1.0), sample(5, temperature=0.6)), ranks=1, micro_batch_tokens=16
    )
    (only,) = micro_batches(packed)
    assert only.sample_index.tolist() == [1, 0]  # longest first
    assert only.temperatures.tolist() == pytest.approx([0.6] * 5 + [1.0] * 3)


def test_s47_uneven_sample_counts_fill_the_ranks_with_padding_and_split_no_rollout() -> None:
    samples = [sample(6, member=member) for member, count in enumerate((1, 1, 3, 2)) for _ in range(count)]
    packed = pack(batch(*samples), ranks=4, micro_batch_tokens=6)
    assert [len(rank) for rank in packed.ranks] == [2, 2, 2, 2]
    padding = [each for each in micro_batches(packed) if not len(each.sample_index)]
    assert len(padding) == 1
    assert not padding[0].trainable.any()
    assert not padding[0].advantages.any()
    assert sorted(i for each in micro_batches(packed) for i in each.sample_index.tolist()) == list(range(7))


def test_s47_a_full_bin_is_split_before_padding_is_added() -> None:
    packed = pack(batch(*[sample(4, member=m) for m in range(4)]), ranks=4, micro_batch_tokens=16)
    assert sorted(i for each in micro_batches(packed) for i in each.sample_index.tolist()) == [0, 1, 2, 3]
    assert all(len(each.sample_index) == 1 for each in micro_batches(packed))


def test_padding_is_a_sequence_of_its_own_at_the_end() -> None:
    packed = pack(batch(sample(5)), ranks=1, micro_batch_tokens=16, pad_to_multiple_of=8)
    (only,) = micro_batches(packed)
    assert only.lengths.tolist() == [5, 3]
    assert only.sample_index.tolist() == [0]
    assert only.trainable.tolist() == [False, True, True, True, True, False, False, False]
    assert only.temperatures[-1] == 1.0


def test_scalar_and_per_token_advantages_mix_and_are_zero_where_nothing_trains() -> None:
    per_token = np.array([9, 1, 2, 3], np.float32)
    packed = pack(
        batch(sample(4, advantage=per_token), sample(3, advantage=-0.5)), ranks=1, micro_batch_tokens=8
    )
    (only,) = micro_batches(packed)
    assert only.advantages.tolist() == [0, 1, 2, 3, 0, -0.5, -0.5]


def test_missing_streams_are_filled_with_what_changes_nothing() -> None:
    full = sample(
        4,
        streams={
            "loss_weights": np.full(4, 2, np.float32),
            "ref_logprobs": np.full(4, -3, np.float32),
            "experts": np.ones((4, 2), np.uint8),
        },
    )
    (only,) = micro_batches(pack(batch(full, sample(3)), ranks=1, micro_batch_tokens=8, pad_to_multiple_of=8))
    assert only.streams["loss_weights"].tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert only.streams["ref_logprobs"].tolist() == [-3, -3, -3, -3, 0, -0.5, -0.5, 0]
    assert only.streams["experts"].sum() == 8
    assert only.streams["experts"].shape == (8, 2)


def test_streams_of_one_name_and_two_kinds_are_refused() -> None:
    one = sample(3, streams={"x": np.zeros(3, np.float32)})
    two = sample(3, member=1, streams={"x": np.zeros(3, np.int32)})
    with pytest.raises(InvariantError, match="'x'"):
        pack(batch(one, two), ranks=1, micro_batch_tokens=8)


def test_a_sample_that_fits_no_micro_batch_is_named() -> None:
    with pytest.raises(InvariantError, match=r"g0\.m0\.a0 has 9 tokens"):
        pack(batch(sample(9)), ranks=1, micro_batch_tokens=8)


def test_ranks_take_about_equally_long_and_the_dearest_micro_batch_comes_first() -> None:
    noise = np.random.default_rng(1)
    samples = [sample(int(n), member=i) for i, n in enumerate(noise.integers(10, 1000, 300))]
    packed = pack(batch(*samples), ranks=8, micro_batch_tokens=1024)
    assert balance(packed) < 1.02
    cost = Cost()
    for rank in packed.ranks:
        costs = [
            cost.linear * (n := m.lengths.astype(float)).sum() + cost.quadratic * (n**2).sum() for m in rank
        ]
        assert costs == sorted(costs, reverse=True)


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(40, 80),
    st.sampled_from([1, 4, 8]),
)
def test_every_token_of_every_sample_is_packed_once(
    lengths: list[int], ranks: int, most: int, multiple: int
) -> None:
    noise = np.random.default_rng(sum(lengths))
    samples = [
        sample(
            n,
            member=i,
            token_ids=noise.integers(0, 1000, n).astype(np.int32),
            advantage=float(i) - 3.5,
            temperature=0.5 + i,
        )
        for i, n in enumerate(lengths)
    ]
    packed = pack(batch(*samples), ranks=ranks, micro_batch_tokens=most, pad_to_multiple_of=multiple)
    assert len({len(rank) for rank in packed.ranks}) == 1
    seen: Counter[int] = Counter()
    for each in micro_batches(packed):
        total = int(each.lengths.sum())
        shortest = MostlyConstant.of(each.advantages, each.lengths, each.trainable)
        assert [a.tolist() for a in each.advantage] == [a.tolist() for a in shortest]
        arrays = (each.token_ids, each.trainable, each.logprobs, each.advantages, each.temperatures)
        assert {len(array) for array in arrays} == {total}
        assert total % multiple == 0
        assert total > 0
        assert int(each.lengths[: len(each.sample_index)].sum()) <= most
        at = 0
        for i, n in zip(each.sample_index.tolist(), each.lengths.tolist(), strict=False):
            ours, span = samples[i], slice(at, at + n)
            assert n == ours.tokens
            assert (each.token_ids[span] == ours.token_ids).all()
            assert (each.trainable[span] == ours.trainable).all()
            assert (each.logprobs[span] == ours.logprobs).all()
            assert (each.advantages[span] == np.where(ours.trainable, ours.advantage, 0)).all()
            assert (each.temperatures[span] == ours.temperature).all()
            seen[i] += 1
            at += n
        assert not each.trainable[at:].any()
    assert seen == Counter(range(len(samples)))


@pytest.mark.timeout(20)
def test_a_great_many_bins_on_few_ranks_are_even_at_once() -> None:
    costs = np.random.default_rng(0).pareto(1.5, 16_384) + 0.1
    totals = [costs[share].sum() for share in assign(costs, 8)]
    assert max(totals) / np.mean(totals) < 1.002


@settings(deadline=None)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=8), st.integers(1, 5))
def test_assignment_is_never_worse_than_the_bound_of_equal_counts(costs: list[float], ranks: int) -> None:
    values = np.array(costs * ranks)
    shares = assign(values, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(values)))
    assert {len(share) for share in shares} == {len(costs)}
    dearest = max(values[share].sum() for share in shares)
    assert dearest <= values.sum() / ranks + values.max() - values.min() + 1e-6
