"""Reads each engine's metrics at an interval and reports them; an engine that does not answer is reported too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from paceline.domain.events import LoadReported
from paceline.ports import Engine

log = logging.getLogger(__name__)


async def poll_load(
    engine: Engine, post: Callable[[LoadReported], None], *, interval_s: float, limit_s: float = 5.0
) -> NoReturn:
    """Report `engine`'s load every `interval_s`, for as long as the task lives. One task an engine.

    The next reading begins when the last one has ended, so a hung engine is asked once at a time and delays no
    other. Whatever goes wrong with a reading, by the engine's fault or by ours, is a report of None: admission
    then does without, and the run goes on.
    """
    loop, failing = asyncio.get_running_loop(), False
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(limit_s):
                load = await engine.load()
        except Exception as error:
            if not failing:  # once a streak: the next one says nothing new
                why = str(error) or type(error).__name__
                log.warning(
                    "engine %s does not say how busy it is, admission goes on without: %s",
                    engine.info.id,
                    why,
                )
            load, failing = None, True
        else:
            if failing:
                log.info("engine %s says again how busy it is", engine.info.id)
            failing = False
        post(LoadReported(engine=engine.info.id, load=load))
        await asyncio.sleep(max(0.0, interval_s - (loop.time() - began)))
