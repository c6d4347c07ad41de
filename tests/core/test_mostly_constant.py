"""Numbers that are mostly one a sequence are kept short, and come back to the bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.domain.mostly_constant import PER_SEQUENCE, PER_TOKEN, WHERE_TRAINABLE, MostlyConstant

_NUMBERS = st.sampled_from([0.0, 0.5, -2.0, float("nan"), float("inf")])
_SEQUENCE = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(_NUMBERS, min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)
    )
)


@given(st.lists(_SEQUENCE, max_size=8), st.lists(st.sampled_from(["all", "trainable", "none"]), max_size=8))
def test_every_number_comes_back_to_the_bit_and_in_parts_as_well(
    drawn: list[tuple[list[float], list[bool]]], even: list[str]
) -> None:
    sequences = []
    for i, (values, mask) in enumerate(drawn):
        how, trainable = (even[i] if i < len(even) else "none"), np.array(mask)
        numbers = np.array(values, np.float32)
        if how != "none":
            numbers = np.full(len(mask), values[0], np.float32)
        if how == "trainable":
            numbers = np.where(trainable, numbers, np.float32(0))
        sequences.append((numbers, trainable))
    lengths = np.array([len(numbers) for numbers, _ in sequences], np.int32)
    numbers = np.concatenate([np.zeros(0, np.float32), *[n for n, _ in sequences]])
    trainable = np.concatenate([np.zeros(0, np.bool_), *[t for _, t in sequences]])
    kept = MostlyConstant.of(numbers, lengths, trainable)
    assert kept.expanded(lengths, trainable).tobytes() == numbers.tobytes()
    assert len(kept.tokens) == kept.token_count(lengths)
    for i, (each, _) in enumerate(sequences):
        if i < len(even) and even[i] == "all":
            assert kept.kinds[i] == PER_SEQUENCE
        elif i < len(even) and even[i] == "trainable":
            assert kept.kinds[i] in (PER_SEQUENCE, WHERE_TRAINABLE)
        assert np.isnan(kept.scalars()[i]) or kept.kinds[i] != PER_TOKEN
        assert len(set(each.view(np.int32).tolist())) == 1 or kept.kinds[i] != PER_SEQUENCE
    counts = [2] * (len(sequences) // 2) + [1] * (len(sequences) % 2)
    at = token = 0
    for count, part in zip(counts, kept.split(counts, lengths), strict=True):
        mine = lengths[at : at + count]
        end = token + int(mine.sum())
        assert part.expanded(mine, trainable[token:end]).tobytes() == numbers[token:end].tobytes()
        at, token = at + count, end
