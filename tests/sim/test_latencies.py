"""The engine model against measured times between tokens (`bench/_latencies.py`)."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("benches")


def test_the_engine_model_tells_measured_times_between_tokens_within_a_tenth() -> None:
    from bench._latencies import LATENCIES, as_shipped, mean_error

    assert mean_error([as_shipped(point) for point in LATENCIES]) < 0.10


def test_constants_fitted_to_the_other_points_tell_each_within_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench._latencies import LATENCIES, left_out, mean_error

    errors = left_out(lambda point: point)
    assert mean_error(errors) < 0.10
    # What a point took has no part in the constants that it is told by.
    first, *others = LATENCIES
    monkeypatch.setattr("bench._latencies.LATENCIES", (first._replace(ms=2 * first.ms), *others))
    assert left_out(lambda point: point)[0] == pytest.approx((errors[0] + 1) / 2 - 1)
