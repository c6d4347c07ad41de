"""Work that leaves the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from time import perf_counter
from typing import ParamSpec, Protocol, TypeVar

from paceline.errors import said_by

SLICE_S = 0.002
"""Longest stretch of work on the loop before it gets a turn; performance.md's measured lags come from none."""

P = ParamSpec("P")
T = TypeVar("T")


def is_cancelled() -> bool:
    """Whether someone is cancelling the task that runs: else a `CancelledError` in it is an error like any other."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def carried(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it. What a future cannot carry, or would carry as an order to somebody else, comes as a RuntimeError: anybody's
    algorithm may raise StopIteration, by a bare `next`, SystemExit, or what a library in another language calls a panic."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (
            isinstance(error, Exception) and not isinstance(error, StopIteration)
        ):
            raise
        raise RuntimeError(f"{said_by(error)} was raised") from error


class Offload(Protocol):
    """Runs a blocking or long function without holding up the loop."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def close(self) -> None: ...


class Threads:
    """In a pool of threads. A hop costs about 22 µs, so hand over large pieces: a group, not a rollout.

    One thread is best for pure Python: two would only take the interpreter from each other, and from the loop.
    """

    def __init__(self, workers: int = 1) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="paceline-work")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: carried(function, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Slices:
    """On the loop, in slices: for pieces well below a slice, whose hop to a thread would cost more than they do."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._work: deque[Callable[[], None]] = deque()
        self._scheduled = False
        # Work is asked for inside an environment's task: what it has set in its context stays its own.
        self._context = copy_context()

    def add(self, work: Callable[[], None]) -> None:
        """Do it soon; it raises nothing. Call on a running loop."""
        self._work.append(work)
        if not self._scheduled:
            self._schedule(asyncio.get_running_loop())

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = True
        loop.call_soon(self._slice, loop, context=self._context.copy())

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> None:
            if not future.done():
                try:
                    future.set_result(carried(function, *args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self.add(work)
        return await future

    def _slice(self, loop: asyncio.AbstractEventLoop) -> None:
        until = perf_counter() + self._slice_s
        try:
            while self._work:
                self._work.popleft()()
                if perf_counter() > until:
                    break
        finally:  # whatever one did that raises all the same, the others are done
            self._scheduled = False
            if self._work:
                self._schedule(loop)

    def close(self) -> None:
        """Nothing to close."""


class Inline:
    """On the loop, at once: for virtual time, where nothing real may be waited for."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    def close(self) -> None:
        """Nothing to close."""
