"""How many rollouts may exist."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pacing import Pacing


@given(st.integers(0, 4), st.integers(1, 64), st.integers(0, 20))
def test_places_are_there_for_the_batches_that_the_held_version_may_still_train(
    lag: int, batch: int, cut: int
) -> None:
    pacing = Pacing(lag, batch, None, 100)
    for held in range(cut + 1):
        ahead = cut - held
        assert pacing.free(cut, held) == (lag + 1 - ahead) * batch
        assert pacing.may_cut(cut + 1, held) is (ahead <= lag)
    assert pacing.free(cut, cut) == pacing.most


@given(st.integers(0, 4), st.integers(1, 16), st.lists(st.booleans(), max_size=60))
def test_no_batch_is_cut_further_ahead_than_the_lag(lag: int, batch: int, loads: list[bool]) -> None:
    pacing, cut, held = Pacing(lag, batch, None, 100), 0, 0
    for load in loads:
        if load:
            held = min(cut, held + 1)
        pacing.taken += max(0, pacing.free(cut, held))
        while pacing.taken >= batch and pacing.may_cut(cut + 1, held):
            cut += 1
            pacing.shipped(batch, 100)
        assert cut - held <= lag + 1
        assert pacing.taken >= 0


@given(st.integers(1, 400), st.integers(100, 5000))
def test_a_batch_by_tokens_learns_how_many_rollouts_make_one(tokens: int, target: int) -> None:
    pacing = Pacing(1, None, target, 200)
    needed = -(-target // tokens)
    for _ in range(40):
        pacing.taken += needed
        pacing.shipped(needed, needed * tokens)
    assert abs(pacing.per_batch - needed) <= 1 + needed // 8


def test_what_was_learnt_of_the_size_of_a_rollout_survives_a_resumption() -> None:
    pacing = Pacing(1, None, 10_000, 4_000)
    pacing.shipped(25, 25 * 400)
    resumed = Pacing(1, None, 10_000, 4_000)
    assert resumed.per_batch == 3, "the guess"
    resumed.restore(pacing.snapshot())
    assert resumed.per_batch == pacing.per_batch == 25
    pacing.shipped(20, 20 * 500)
    resumed.shipped(20, 20 * 500)
    assert resumed.per_batch == pacing.per_batch


def test_batches_of_one_rollout_stay_batches_of_one_rollout() -> None:
    pacing = Pacing(1, None, 10_000, 200)
    for _ in range(10):
        pacing.shipped(1, 10_000)
        assert pacing.per_batch == 1
