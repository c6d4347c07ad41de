"""Randomness that depends on what it is for, and on nothing that happened before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.streams import key, mix, permutation, uniform


def test_a_key_is_the_same_on_every_machine() -> None:
    assert mix(0, 0) == 0xE220A8397B1DCDAF, "splitmix64's published first output for seed 0"


def test_purposes_that_read_alike_have_different_keys() -> None:
    assert len({key(1, "a", "b"), key(1, "ab"), key(1, "a", "b", ""), key(11, "b"), key(1, "b", "a")}) == 5
    assert key(1, 23) != key(12, 3)


@given(st.integers(0, 2**64 - 1))
def test_uniform_numbers_fill_the_unit_interval(base: int) -> None:
    numbers = [uniform(base, n) for n in range(400)]
    assert 0.0 <= min(numbers) < 0.1
    assert 0.9 < max(numbers) < 1.0
    assert 0.4 < sum(numbers) / 400 < 0.6
    assert len(set(numbers)) == 400


@given(st.integers(0, 1000), st.integers(0, 200))
def test_a_permutation_holds_everything_once_and_repeats(seed: int, n: int) -> None:
    order = permutation(seed, n, "order", "env", 0)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, permutation(seed, n, "order", "env", 0))
    if n > 20:
        assert not np.array_equal(order, permutation(seed, n, "order", "env", 1))
