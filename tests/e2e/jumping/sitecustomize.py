"""A wall clock that jumps by up to six hours, forwards and back, every few tenths of a second: put this folder on PYTHONPATH."""

import random
import time

_time, _time_ns = time.time, time.time_ns


def _offset_s() -> float:
    return random.Random(int(time.monotonic() / 0.3)).uniform(-6 * 3600.0, 6 * 3600.0)


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + int(1e9 * _offset_s())
