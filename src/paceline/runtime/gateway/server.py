"""The gateway's routes: who asks, what for, and how the answer travels."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from aiohttp import web

from paceline.config.gateway import GatewaySection
from paceline.envs.endpoint import Endpoint
from paceline.errors import ConfigError
from paceline.runtime.gateway.asked import Answered, Asked, Dialect, Telling
from paceline.runtime.gateway.dialects import anthropic, chat, completions, responses, token_ids
from paceline.runtime.gateway.failures import Refused, refused
from paceline.runtime.gateway.session import Call, Calls, Session, format_of
from paceline.tokens.tokenizer import ChatTokenizer

PING_S: Final = 5.0
"""Seconds a stream waits for the first of its answer before it begins, and between the comments that keep it alive: until
it has begun, a failure can still be told by its HTTP status."""

_CLOSE_S: Final = 1.0
"""Seconds that answers on their way have when the gateway closes."""

DIALECTS: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": chat.Chat(),
    "/v1/completions": completions.Completions(),
    "/v1/responses": responses.Responses(),
    "/v1/messages": anthropic.Messages(),
    "/inference/v1/generate": token_ids.Generate(),
}


class Gateway:
    """Serves the rollouts of one run. Listens from the first session on."""

    def __init__(self, config: GatewaySection, tokenizer: ChatTokenizer, model: str) -> None:
        self._config = config
        self._model = model
        self._format = format_of(config, tokenizer)
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.url = ""
        """Where it listens; empty before the first session."""

    @contextlib.asynccontextmanager
    async def session(self, label: str, calls: Calls) -> AsyncIterator[Endpoint]:
        """Serve a rollout as long as the context lasts. ConfigError if the address cannot be listened on."""
        async with self._starting:
            if self._runner is None:
                await self._listen()
        secret = secrets.token_urlsafe(32)
        session = Session(label, secret, calls, self._config, self._model, self._format)
        self._sessions[label] = session
        try:
            yield Endpoint(f"{self._config.public_url or self.url}/{label}", secret)
        finally:
            self._sessions.pop(label, None)
            await session.close()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self) -> None:
        config = self._config
        app = web.Application(client_max_size=int(config.max_body_mb * 1e6))
        for path, dialect in DIALECTS.items():
            app.router.add_post("/{rollout}" + path, _handler(self, path, dialect))
        app.router.add_post("/{rollout}/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/{rollout}/v1/models", self._models)
        app.router.add_route("*", "/{anything:.*}", _unknown)
        # A client that goes away cancels its handler: that is how a lost answer is noticed. The call itself is a task
        # of the session, and goes on.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except (OSError, socket.gaierror) as error:
            await runner.cleanup()
            raise ConfigError(
                f"the gateway cannot listen on {config.host}:{config.port}: {error.strerror or error}; set "
                "gateway.host and gateway.port to what is free"
            ) from error
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _admitted(self, request: web.Request) -> Session:
        header = request.headers.get("Authorization", "")
        secret = header[7:] if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        session = self._sessions.get(request.match_info["rollout"])
        # A rollout that is over and a wrong secret look the same: nobody learns which rollouts there are.
        if session is None or not session.knows(secret):
            raise Refused(
                401,
                "no rollout is served here with this API key: it is over, or the key is wrong",
                code="invalid_api_key",
            )
        return session

    # ── routes ──

    async def answer(self, request: web.Request, path: str, dialect: Dialect) -> web.StreamResponse:
        call: Call | None = None
        written = False
        try:
            session = self._admitted(request)
            raw = await _body(request)
            digest = hashlib.blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
            call = session.find(digest, request.headers)
            asked = None if call is None else call.asked
            if asked is None:
                asked = dialect.read(_decoded(raw), session)
            if call is None:
                call = session.start(digest, request.headers, asked)
            call.waiting += 1
            if asked.stream:
                stream = _Stream(request, dialect, call, asked, session)
                response = await stream.run()
                written = stream.written
                return response
            answered = await asyncio.shield(call.task)
            content = dialect.write(asked, answered, session)
            response = _json(content, headers=_noted(asked))
            await response.prepare(request)
            await response.write_eof()
            written = True
            return response
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, ConnectionError):
                raise
            written = True
            return _failure(refused(error), dialect)
        finally:
            if call is not None:
                call.leaves(told=written)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        dialect = DIALECTS["/v1/messages"]
        try:
            session = self._admitted(request)
            body = _decoded(await _body(request))
            asked = dialect.read({"max_tokens": 1, **body}, session)
            tokenizer = session.calls.tokenizer
            ids = tokenizer.encode(tokenizer.render(asked.messages, asked.tools))
            return _json({"input_tokens": len(ids)})
        except Exception as error:
            return _failure(refused(error), dialect)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._admitted(request)
        except Refused as error:
            return _failure(error, DIALECTS["/v1/chat/completions"])
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "paceline"}
        return _json({"object": "list", "data": [entry]})


class _Stream:
    """One answer as server-sent events."""

    def __init__(
        self, request: web.Request, dialect: Dialect, call: Call, asked: Asked, session: Session
    ) -> None:
        self._request, self._dialect, self._call = request, dialect, call
        self._asked, self._session = asked, session
        self.written = False
        """Whether all of it has been handed to the connection."""

    async def run(self) -> web.StreamResponse:
        call = self._call
        await call.more(0, PING_S)
        if call.task.done() and not call.pieces:
            call.task.result()  # a failure has its status
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                **_noted(self._asked),
            }
        )
        await response.prepare(self._request)
        telling: Telling | None = None
        told = 0
        while True:
            news = call.pieces[told:]
            told += len(news)
            if news:
                assert call.heading is not None
                telling = telling or self._dialect.telling(self._asked, call.heading, self._session)
                await response.write(b"".join([telling.add(*piece) for piece in news]))
            elif call.task.done():
                break
            else:
                await response.write(b": waiting for the model\n\n")
            await call.more(told, PING_S)
        last = self._late_failure(call.task)
        if last is None:
            answered = call.task.result()
            telling = telling or self._dialect.telling(self._asked, answered, self._session)
            last = telling.end(answered)
        await response.write(last)
        await response.write_eof()
        self.written = True
        return response

    def _late_failure(self, task: asyncio.Task[Answered]) -> bytes | None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return None
        return b"event: error\ndata: " + msgspec.json.encode(self._dialect.error(refused(error))) + b"\n\n"


def _handler(gateway: Gateway, path: str, dialect: Dialect) -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await gateway.answer(request, path, dialect)

    return handle


async def _unknown(request: web.Request) -> web.StreamResponse:
    text = f"{request.method} {request.path} is nothing that is served here; see docs/gateway.md for what is"
    return _failure(Refused(404, text, code="unknown_route"), DIALECTS["/v1/chat/completions"])


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"the request is larger than {request.client_max_size} bytes (gateway.max_body_mb)"
        raise Refused(413, text, code="request_too_large") from error


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a {type(body).__name__}; expected a JSON object")
    return body


def _noted(asked: Asked) -> dict[str, str]:
    ignored = asked.ignored
    return {"x-paceline-ignored": ", ".join(ignored)} if ignored else {}


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json", headers=headers
    )


def _failure(error: Refused, dialect: Dialect) -> web.Response:
    return _json(dialect.error(error), error.status, {"x-should-retry": "true" if error.again else "false"})
