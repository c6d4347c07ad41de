"""Random faults and kills: what holds over all lives of a run."""

from __future__ import annotations

import pytest

from paceline.testing import storm

LOTS = 25


@pytest.mark.parametrize("lot", range(LOTS))
def test_nothing_is_lost_or_trained_twice_whatever_fails_and_whenever_it_is_killed(lot: int) -> None:
    for seed in range(20 * lot, 20 * lot + 20):
        try:
            storm.run_seed(seed, 60)
        except Exception as error:
            again = f"python -m paceline.testing.storm --first {seed} --seeds 1 --events 60"
            raise AssertionError(f"seed {seed}: {error}; again: {again}") from error
