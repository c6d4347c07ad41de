"""What surrounds an environment in a run: how large its groups are, what it may set up at once, whom it may ask."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

from paceline.errors import EnvError

Ask: TypeAlias = Callable[[str, Any], Awaitable[Any]]
"""Asks a service of the run by name."""


class Surroundings(Protocol):
    """Given to an environment before its first rollout."""

    @property
    def group_size(self) -> int:
        """Rollouts of one group."""
        ...

    def cold_start(self) -> AbstractAsyncContextManager[None]:
        """Hold a place among the sandboxes that are set up at once."""
        ...

    @property
    def ask(self) -> Ask:
        """Asks a service of the run. EnvError when it has none of that name."""
        ...


class ColdStarts:
    """Limits on setting sandboxes up: at once, and in any second. First come, first served."""

    def __init__(self, at_once: int | None = None, per_s: float | None = None) -> None:
        self._places = None if at_once is None else asyncio.Semaphore(at_once)
        # A window, not a bucket: providers count what they see in a second. 0.5 a second is one in two.
        self._burst = 0 if per_s is None else max(1, int(per_s))
        self._window_s = 0.0 if per_s is None else self._burst / per_s
        self._begun: deque[float] = deque()
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Wait for a place, and for the moment; `end` gives the place back."""
        if self._places is not None:
            await self._places.acquire()
        if not self._burst:
            return
        try:
            async with self._turn:
                loop = asyncio.get_running_loop()
                if len(self._begun) == self._burst:
                    until = self._begun.popleft() + self._window_s
                    if (wait := until - loop.time()) > 0:
                        await asyncio.sleep(wait)
                self._begun.append(loop.time())
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self._places is not None:
            self._places.release()


async def no_service(service: str, request: Any) -> Any:
    raise EnvError(
        f"the environment asks for service {service!r}, but none is configured: add it to [services], or as [chat.NAME]"
    )


class InRun:
    """The surroundings of an environment that runs in the orchestrator; those of workers lead here."""

    def __init__(
        self, group_size: int = 1, cold_starts: ColdStarts | None = None, ask: Ask = no_service
    ) -> None:
        self.group_size = group_size
        self.cold_starts = cold_starts or ColdStarts()
        self.ask = ask

    @asynccontextmanager
    async def cold_start(self) -> AsyncIterator[None]:
        await self.cold_starts.begin()
        try:
            yield
        finally:
            self.cold_starts.end()
