"""The thread that the engine runs on: its steps, and what is posted to it, between two of them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from aiohttp import web

from paceline.engines.embedded.engine import Engine

T = TypeVar("T")


class EngineThread:
    """Runs the engine's steps, and posted calls between them. It ends with `stop`, or with the first error."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._stopping = engine, False
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the error that ended the thread; what was in flight will not be answered."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)  # a thread's own setting
        try:
            while not self._stopping:
                if not self._engine.has_work:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._engine.has_work:
                    self._engine.step()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self.failed.set_exception, error)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread, between two steps."""
        return await self.answer(lambda reply: reply(function()))

    async def answer(self, function: Callable[[Callable[[T], object]], object]) -> T:
        """Like `call`, for a function that replies later, from the engine thread."""
        future: asyncio.Future[T] = self._loop.create_future()

        def deliver(result: T) -> None:
            if not future.done():  # it is, if the caller has been cancelled
                future.set_result(result)

        self._inbox.put(lambda: function(lambda result: self._loop.call_soon_threadsafe(deliver, result)))
        either: list[asyncio.Future[Any]] = [future, self.failed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            future.cancel()  # nothing, if it has its result
        if future.cancelled():
            raise web.HTTPInternalServerError(text=f"the engine ended: {self.failed.exception()!r}")
        return future.result()

    def post(self, function: Callable[[], object]) -> None:
        self._inbox.put(function)

    def stop(self) -> None:
        self._inbox.put(lambda: setattr(self, "_stopping", True))
        self._thread.join()
