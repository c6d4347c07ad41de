"""The collector of reference cycles is left as it was."""

from __future__ import annotations

import gc

import pytest

from paceline.sim.collecting import rare_collections


def test_cycles_are_looked_for_rarely_inside_and_as_before_behind_whatever_happens() -> None:
    before = gc.get_threshold()
    inside: list[tuple[int, int, int]] = []

    def fails() -> None:
        with rare_collections():
            inside.append(gc.get_threshold())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert inside[0] != before
    assert all(a >= b for a, b in zip(inside[0], before, strict=True))
    assert gc.get_threshold() == before


def test_a_collector_that_is_switched_off_stays_so() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
