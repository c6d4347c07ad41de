"""A place for an engine in a run: the engine in it may be replaced, when it died and was started again.

Everything else in the runtime holds the slot, so that nothing has to be told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from paceline.domain.events import EngineJoined
from paceline.domain.ids import Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.errors import EngineError
from paceline.ports import Engine, GenerateReply, GenerateRequest

log = logging.getLogger(__name__)

_FIRST_S, _MOST_S = 0.5, 30.0
"""Seconds between attempts to get an engine back, doubling."""

_STEADY_S = 60.0
"""An engine that is gone again sooner than this was not mended: the next attempt waits longer."""


class EngineSlot:
    """An `Engine` that stands for whichever engine is in the slot now."""

    def __init__(self, engine: Engine, renew: Callable[[], Awaitable[tuple[Engine, Version]]]) -> None:
        """`renew` starts or finds the engine again, and says which version it holds. EngineError when it cannot."""
        self.engine = engine
        self._renew = renew
        self._wait_s = 0.0
        self._back_at = float("-inf")
        self._leaves = False

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self.engine.generate(request)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def load(self) -> EngineLoad:
        return await self.engine.load()

    async def update_weights(self, version: Version, path: str) -> None:
        await self.engine.update_weights(version, path)

    async def revive(self) -> EngineJoined:
        """Get the engine back, however long it takes; the core bounds how long a run waits without any."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._back_at > _STEADY_S:
            self._wait_s = 0.0
        while True:
            await asyncio.sleep(self._wait_s)
            if self._leaves:
                await (
                    asyncio.Event().wait()
                )  # nobody wants it back any more; whoever asked is stopped with the run
            self._wait_s = min(_MOST_S, max(_FIRST_S, 2 * self._wait_s))
            try:
                engine, version = await self._renew()
            except EngineError as error:
                log.warning(
                    "engine %s is not back, trying again in %.1f s: %s", self.info.id, self._wait_s, error
                )
                continue
            self._back_at = loop.time()
            old, self.engine = self.engine, engine
            if old is not engine:
                await old.close()
            return EngineJoined(engine.info, version)

    def leave(self) -> None:
        """It is not wanted back."""
        self._leaves = True

    async def close(self) -> None:
        await self.engine.close()
