"""Ends code that runs on without end, from outside of it: in the main thread, where the system has alarms."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StillRunning(Exception):
    """What was to end within a time did not."""


class _Alarm(BaseException):
    """Raised in the middle of that code, which may catch it."""


@contextmanager
def ends_within(seconds: float, place: Callable[[FrameType | None], str]) -> Iterator[None]:
    """StillRunning when the block takes longer, in real time, with `place` of the frame that ran then. Where there is no
    alarm (another thread, Windows) nothing watches."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    rang: list[str] = []
    done = False

    def ring(number: int, frame: FrameType | None) -> None:
        if done:
            return  # between the block's end and the alarm's: nobody is there to catch it
        rang.append(place(frame))
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: what is raised once may be caught by the very code that does not end.
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            done = True
    except (_Alarm, Exception):
        # Any other error, once it rang: it was caught on its way, by a loop in whose callback it rang for one, which then
        # could not go on.
        if not rang:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)
    if rang:
        where = next(filter(None, rang), "")
        raise StillRunning(f"it ran for {seconds:g} s{f', and is at {where}' if where else ''}")
