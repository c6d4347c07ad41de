"""An engine of the asyncio runtime that does as it is told: answers, delays, errors, aborts that keep tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TypeAlias

import numpy as np

from paceline.domain.events import EngineJoined
from paceline.domain.ids import EngineId, Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Finish
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.testing.tokens import byte_tokenizer

Answer: TypeAlias = str | BaseException
"""What is said to one request (an end token is added), or what is raised."""


class ScriptedEngine:
    """Samples at an even pace. New weights count for the tokens that are still to come, as with a real engine."""

    def __init__(
        self,
        id: EngineId = "e0",
        *,
        answer: Callable[[GenerateRequest], Answer] = lambda _request: "yes",
        seconds: Callable[[GenerateRequest], float] = lambda _request: 1.0,
        load_s: Callable[[Version], float] = lambda _version: 0.0,
        load_error: Callable[[Version], str | None] = lambda _version: None,
        revive_s: float = inf,
        version: Version = 0,
        is_deaf: bool = False,
    ) -> None:
        """`seconds` of a request may be infinite. A deaf engine takes aborts and goes on sampling.

        `revive_s` seconds after it was taken out of the run it is back, with what it holds.
        """
        self.info = EngineInfo(id, None, None)
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.aborts: list[str] = []
        self.updates: list[Version] = []
        """Versions that it was told to load, failures included."""
        self.peak = 0
        """Most requests at once."""
        self._answer = answer
        self._seconds = seconds
        self._load_s = load_s
        self._load_error = load_error
        self._revive_s = revive_s
        self._is_deaf = is_deaf
        self._calls: dict[str, _Call] = {}
        self._tokenizer = byte_tokenizer()

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._calls)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        answer, seconds = self._answer(request), self._seconds(request)
        loop = asyncio.get_running_loop()
        if isinstance(answer, BaseException):
            tokens: list[int] = []
        else:
            tokens = [*self._tokenizer.encode(answer), self._tokenizer.stop_ids[0]]
        allowed = request.sampling.max_tokens
        finish: Finish = "stop" if len(tokens) <= allowed else "length"
        call = self._calls[request.request_id] = _Call(len(tokens[:allowed]), seconds, loop.time())
        self.peak = max(self.peak, len(self._calls))
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await call.stopped.wait()
            finish = "abort"
        except TimeoutError:
            if isinstance(answer, BaseException):
                raise answer from None
        finally:
            del self._calls[request.request_id]
        count = call.done(loop.time()) if finish == "abort" else call.tokens
        call.mark(count, self.version)
        ids = np.array(tokens[:count], np.int32)
        return GenerateReply(ids, np.full(count, -0.5, np.float32), finish, call.versions())

    async def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if request_id in self._calls and not self._is_deaf:
            self._calls[request_id].stopped.set()

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._calls), waiting=0, kv_usage=0.0, preemptions=0)

    async def update_weights(self, version: Version, path: str) -> None:
        self.updates.append(version)
        await asyncio.sleep(self._load_s(version))
        error = self._load_error(version)
        if error is not None:
            raise EngineError(f"engine {self.info.id}: {error}")
        now = asyncio.get_running_loop().time()
        for call in self._calls.values():
            call.mark(call.done(now), self.version)
        self.version = version

    async def revive(self) -> EngineJoined:
        if self._revive_s == inf:
            await asyncio.Event().wait()
        await asyncio.sleep(self._revive_s)
        return EngineJoined(self.info, self.version)

    async def close(self) -> None: ...


class _Call:
    """One request under way."""

    def __init__(self, tokens: int, seconds: float, began: float) -> None:
        self.tokens = tokens
        self.stopped = asyncio.Event()
        self._seconds = seconds
        self._began = began
        self._runs: list[tuple[Version, int]] = []
        self._marked = 0

    def done(self, now: float) -> int:
        """Tokens sampled by now."""
        if self._seconds in (0.0, inf):
            return 0
        return min(self.tokens, int(self.tokens * (now - self._began) / self._seconds))

    def mark(self, done: int, version: Version) -> None:
        """The tokens since the last mark are this version's."""
        if done > self._marked:
            self._runs.append((version, done - self._marked))
            self._marked = done

    def versions(self) -> tuple[tuple[Version, int], ...]:
        return tuple(self._runs)
