"""In the worker: the model, as a rollout there sees it. Each call is a question to the orchestrator."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.envs.endpoint import Endpoint
from paceline.envs.protocol import ChatMessage, Reply, RolloutTruncated, Says, messages_of
from paceline.envs.workers import wire
from paceline.errors import EnvError, ModelCallFailed, said_by

_REACH_S: Final = 10.0
"""Seconds the gateway may take to accept a first connection from this host."""

Send = Callable[[Any], None]
T = TypeVar("T")


class Questions:
    """Questions under way, by number; an answer wakes who asked."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, asyncio.Future[Any]] = {}

    def open(self) -> tuple[int, asyncio.Future[Any]]:
        self._next += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[self._next] = future
        return self._next, future

    def close(self, number: int) -> None:
        self._open.pop(number, None)

    def answer(self, number: int, value: Any) -> None:
        future = self._open.get(number)
        if future is not None and not future.done():
            future.set_result(value)

    def refuse(self, refused: wire.Refused) -> None:
        future = self._open.get(refused.ask)
        if future is None or future.done():
            return
        if refused.kind == "cancelled":
            future.cancel()
        elif refused.kind == "truncated" and refused.limit is not None:
            future.set_exception(RolloutTruncated(refused.limit, refused.text))
        elif refused.kind == "engine":
            future.set_exception(ModelCallFailed(refused.text))
        else:
            future.set_exception(EnvError(refused.text))


class RemoteModel:
    """A `Model` whose calls are carried out by the orchestrator, one at a time."""

    def __init__(self, call: int, send: Send, reached: set[str]) -> None:
        """`reached`: addresses of gateways that this worker has found to answer; it adds to them."""
        self._call = call
        self._send = send
        self._reached = reached
        self.questions = Questions()
        self.last: Reply | None = None

    async def chat(
        self, *says: Says, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply:
        new = [message for said in says for message in messages_of(said)]
        return await self._ask("chat", new, tools, max_tokens)

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        return await self._ask("complete", list(messages), tools, max_tokens)

    async def generate(
        self, token_ids: Sequence[int] | NDArray[np.int32], *, max_tokens: int | None = None
    ) -> Reply:
        ids = np.asarray(token_ids, np.int32)
        return await self._ask("generate", [], None, max_tokens, ids.astype("<i4").tobytes())

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Endpoint]:
        """See `Serves`: the orchestrator's gateway serves; programs here reach it over the network."""
        serving, opened = self.questions.open()
        try:
            self._send(wire.BeginServe(self._call, serving))
            endpoint: Endpoint = await opened
            await self._reach(endpoint.base_url)
            yield endpoint
        finally:
            self.questions.close(serving)
            ending, closed = self.questions.open()
            try:
                self._send(wire.EndServe(self._call, ending, serving))
                self.last = await closed
            finally:
                self.questions.close(ending)

    async def _reach(self, url: str) -> None:
        """EnvError, with what to set, where the gateway cannot be reached from this host."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if parts.netloc in self._reached:
            return
        try:
            async with asyncio.timeout(_REACH_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except (OSError, TimeoutError) as error:
            why = said_by(error)
        else:
            writer.close()
            self._reached.add(parts.netloc)
            return
        raise EnvError(
            f"the gateway at {parts.netloc} cannot be reached from {socket.gethostname()}, where the environment runs "
            f"({why}): set gateway.host to an address of the orchestrator's host that others reach, and "
            "gateway.public_url to how they do"
        )

    async def _ask(
        self,
        method: Any,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
        token_ids: bytes = b"",
    ) -> Reply:
        try:
            plain = msgspec.to_builtins([dict(m) for m in messages])
            plain_tools = None if tools is None else msgspec.to_builtins([dict(t) for t in tools])
        except TypeError as error:
            raise EnvError(f"messages and tools must be JSON-like: {error}") from error
        number, future = self.questions.open()
        try:
            self._send(wire.Ask(self._call, number, method, plain, plain_tools, max_tokens, token_ids))
            self.last = reply = await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._send(wire.GiveUp(self._call, number))
            raise
        finally:
            self.questions.close(number)
        return reply  # type: ignore[no-any-return]


def reply_of(said: wire.Said) -> Reply:
    """What was said, with its arrays."""
    ids = np.frombuffer(said.token_ids, "<i4").astype(np.int32, copy=False)
    logprobs = np.frombuffer(said.logprobs, "<f4").astype(np.float32, copy=False)
    return Reply(said.text, said.finish, ids, logprobs)


def said_of(reply: Reply) -> wire.Said:
    """The same, to be sent."""
    return wire.Said(
        reply.text,
        reply.finish,
        np.ascontiguousarray(reply.token_ids, "<i4").tobytes(),
        np.ascontiguousarray(reply.logprobs, "<f4").tobytes(),
    )
