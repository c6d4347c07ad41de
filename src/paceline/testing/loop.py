"""Virtual time: the real asyncio loop, but waiting an hour takes no time, and a deadlock is an error.

No sockets: nothing outside the process can wake this loop. Threads can; what they do takes no virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.SelectSelector):
    """Says at once that the time asked for has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads:
            # A thread's result is a matter of real time; the clock stands still until it is there.
            return super().select(None if timeout is None or timeout > 0 else 0.0)
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and jumps to the next timer whenever nothing else is left to do."""

    def __init__(self) -> None:
        self._no_wait = _NoWait()
        super().__init__(self._no_wait)

    def time(self) -> float:
        return self._no_wait.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._no_wait.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._no_wait.threads += 1  # it waits for a thread that joins the others
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._no_wait.threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._no_wait.threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time. RuntimeError when it can never end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
