"""The one place that subtracts versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.staleness import lead, oldest_allowed, staleness, trained_by
from paceline.errors import InvariantError


def test_step_n_trains_the_version_before_it() -> None:
    assert [trained_by(step) for step in (1, 2, 10)] == [0, 1, 9]


@given(st.integers(0, 50), st.integers(1, 60), st.integers(0, 9))
def test_what_is_allowed_is_exactly_what_is_not_staler_than_the_bound(
    version: int, step: int, bound: int
) -> None:
    if version > trained_by(step):
        with pytest.raises(InvariantError, match=f"v{version}"):
            staleness(version, step)
    else:
        assert (staleness(version, step) <= bound) is (version >= oldest_allowed(step, bound))


def test_the_lead_is_how_far_generation_runs_ahead() -> None:
    assert lead(1, 0) == 0, "collecting for step 1 on v0 is on-policy"
    assert lead(3, 1) == 1
