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


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (720, "a checkpoint was made before its record was done, and missed what that started"),
        (1028, "a rollout went on with more tokens than the journal knew of"),
        (2030, "a task was put off twice, since the members that it left behind went on"),
        (3371, "members of a group that runs in one call trained with tokens that were counted as failed"),
        (2684, "members that were left behind were stopped before it was known which of them go on"),
    ],
)
def test_what_long_storms_have_found_stays_mended(seed: int, found: str) -> None:
    storm.run_seed(seed)
