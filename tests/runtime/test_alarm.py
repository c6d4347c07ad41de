"""What runs on without end is ended, and an alarm that comes when it has ended by itself does no harm."""

from __future__ import annotations

import signal

import pytest

from paceline.runtime.alarm import StillRunning, ends_within


def _runs_on() -> None:
    while True:
        pass


def test_what_runs_on_is_ended_with_its_place() -> None:
    with (
        pytest.raises(StillRunning, match=r"it ran for 0\.05 s, and is at here"),
        ends_within(0.05, lambda _: "here"),
    ):
        _runs_on()


def test_an_alarm_behind_the_end_of_the_block_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timer, ring = signal.setitimer, []

    def late(which: int, seconds: float, every: float = 0.0) -> tuple[float, float]:
        if ring:
            signal.raise_signal(signal.SIGALRM)  # just before it is switched off
        ring.append(seconds)
        return set_timer(which, seconds, every)

    monkeypatch.setattr(signal, "setitimer", late)
    with ends_within(60.0, lambda _: ""):
        pass
    assert len(ring) == 2


def _breaks_of_it() -> None:
    try:
        _runs_on()
    except BaseException as caught:
        raise RuntimeError("every task waits, and no timer is set") from caught


def test_what_breaks_because_the_alarm_was_caught_on_its_way_is_no_other_error() -> None:
    with pytest.raises(StillRunning, match="it ran for"), ends_within(0.05, lambda _: ""):
        _breaks_of_it()


def test_an_error_before_the_alarm_is_that_error() -> None:
    with pytest.raises(RuntimeError, match="mine"), ends_within(5.0, lambda _: ""):
        raise RuntimeError("mine")
