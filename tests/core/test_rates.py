"""Start rates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.rates import StartRate


@given(st.floats(1.0, 6000.0), st.lists(st.floats(0.0, 20.0), min_size=1, max_size=200))
def test_no_minute_sees_more_starts_than_the_rate_and_one_burst(
    per_minute: float, waits: list[float]
) -> None:
    rate, now, starts = StartRate(per_minute), 0.0, []
    for wait in waits:
        now += wait
        while rate.free(now) and len(starts) < 5000:
            rate.take(now)
            starts.append(now)
    burst = max(1.0, per_minute / 60)
    for first in range(len(starts)):
        within = sum(1 for at in starts[first:] if at < starts[first] + 60.0)
        assert within <= per_minute + burst + 1


@given(st.floats(1.0, 600.0), st.floats(0.0, 1e6))
def test_waking_at_the_moment_it_names_is_never_too_early(per_minute: float, began: float) -> None:
    rate, now = StartRate(per_minute), began
    for _ in range(50):
        if not rate.free(now):
            now = rate.next_at(now)
        assert rate.free(now)
        rate.take(now)


def test_a_rate_below_one_a_second_still_starts_one_at_once() -> None:
    rate = StartRate(6.0)
    assert rate.free(0.0)
    rate.take(0.0)
    assert rate.next_at(0.0) == 10.0
    assert not rate.free(9.9)
    assert rate.free(10.0)
