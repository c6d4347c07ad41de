"""Work that leaves the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Inline:
    """On the loop, at once: for virtual time, where nothing real may be waited for."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    def close(self) -> None:
        """Nothing to close."""
