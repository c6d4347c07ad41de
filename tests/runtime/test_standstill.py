"""A loop that stands still is noticed by a thread, with the place that holds it up."""

from __future__ import annotations

import asyncio
import threading
import time

from paceline.runtime.standstill import StandstillWatch


def hold_up() -> None:
    """What an environment does that does not await."""
    time.sleep(0.001)


async def test_a_standstill_is_told_once_with_its_place_and_ended_when_it_lasts() -> None:
    told: list[str] = []
    ended = threading.Event()
    watch = StandstillWatch(
        lambda _s, place: told.append(place),
        lambda _s, _place: ended.set(),
        0.3,
        patience_s=0.05,
        tick_s=0.01,
    )
    while not ended.is_set():
        hold_up()
    watch.close()
    [place] = told
    assert place.startswith("test_standstill.py:")


async def test_a_loop_that_turns_is_left_alone() -> None:
    told: list[str] = []
    watch = StandstillWatch(
        lambda _s, place: told.append(place),
        lambda _s, place: told.append(place),
        60.0,
        patience_s=5.0,
        tick_s=0.01,
    )
    await asyncio.sleep(0.1)
    watch.close()
    assert told == []
