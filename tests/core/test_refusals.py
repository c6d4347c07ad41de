"""Which refusals make up a row, and which calls they leave out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.refusals import Refusals, one_more


def row(*gaps_s: float, seconds: float = 1.5) -> Refusals:
    now, refusals = 0.0, None
    for gap_s in gaps_s:
        now += gap_s
        refusals = one_more(refusals, seconds, f"answered 429 at {now:g}", now)
    assert refusals is not None
    return refusals


def test_refusals_one_after_the_other_are_one_row_and_a_time_without_calls_begins_another() -> None:
    assert row(5.0, 8.0, 8.0) == Refusals(3, 5.0, 21.0, 1.5, "answered 429 at 21")
    assert row(5.0, 8.0, 1000.0, 8.0) == Refusals(2, 1013.0, 1021.0, 1.5, "answered 429 at 1021")


@given(st.floats(0.0, 600.0), st.floats(0.0, 8.0))
def test_however_long_a_refusal_takes_turns_that_ask_again_make_one_row(
    seconds: float, wait_s: float
) -> None:
    assert row(*[wait_s + seconds] * 4, seconds=seconds).calls == 4


def test_a_call_that_is_under_way_for_much_longer_than_a_refusal_takes_was_taken() -> None:
    refusals = row(0.0, 20.0, 20.0, 20.0, seconds=20.0)
    assert refusals.took(60.0 - 41.0)
    assert not refusals.took(60.0 - 39.0)
    assert row(0.0, 5.0, 25.0, 10.0).took(9.0), "quick ones are given half a minute"
