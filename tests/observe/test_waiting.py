"""A run that waits for a trainer says so, once."""

from __future__ import annotations

import pytest

from paceline.domain import events as on
from paceline.observe.waiting import TrainerAwaited

SHIPPED, OTHER = on.BatchShipped(1, 10, 0.0, 0.0), on.TimerFired()
TRAINED = on.StepTrained(1, {})


@pytest.mark.parametrize(
    ("story", "told"),
    [
        ([(0.0, OTHER), (50.0, OTHER)], 0),  # nothing to train yet
        ([(1.0, SHIPPED), (1.5, OTHER), (3.0, OTHER), (9.0, SHIPPED), (20.0, OTHER)], 1),
        ([(1.0, SHIPPED), (2.0, TRAINED), (20.0, SHIPPED), (90.0, OTHER)], 0),
        ([(1.0, TRAINED), (2.0, SHIPPED), (20.0, OTHER)], 0),  # it trains again what an earlier life shipped
    ],
)
def test_a_batch_that_nobody_acknowledges_is_told_of_once(
    story: list[tuple[float, on.Event]], told: int
) -> None:
    said: list[None] = []
    fold = TrainerAwaited(lambda: said.append(None), patience_s=2.0)
    for at, event in story:
        fold.apply(at, event, ())
    assert len(said) == told
