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
