"""The HTTP link to one server: one session, finite calls, failures told apart by what they leave behind."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import yarl

from paceline.engines.http.retry import Retry, is_transient, retry_after_s
from paceline.engines.http.wire import error_text
from paceline.errors import ConfigError, EngineError, EngineUnavailable, without_password

_JSON = {"Content-Type": "application/json"}
_LARGEST_REPLY = 256 * 2**20
"""Bytes. A reply of 32k tokens with logprobs is about 4 MB; a hostile length must not fill the memory."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Seconds each kind of call may take, each try for itself; a generate call, and an update of weights, with all."""

    request_s: float = 600.0
    admin_s: float = 20.0
    load_weights_s: float = 600.0
    metrics_s: float = 5.0
    connect_s: float = 10.0


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the server answered, whatever it was."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def is_missing(self) -> bool:
        """The server does not have the route, or not this method of it, or keeps it switched off."""
        return self.status in (403, 404, 405, 501)


class LinkLost(Exception):
    """No whole answer came. `arrived` says whether the server may have taken the call all the same."""

    def __init__(self, cause: str, *, arrived: bool) -> None:
        super().__init__(cause)
        self.arrived = arrived


class Link:
    """Calls to one server. `name` begins every error: it says which engine, and where."""

    def __init__(self, url: str, name: str, limits: Limits, retry: Retry, api_key: str | None = None) -> None:
        self.url, self.name = url.rstrip("/"), without_password(name)
        self.limits, self.retry = limits, retry
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine address {without_password(url)!r} must begin with http:// or https://")
        try:
            self._base = yarl.URL(self.url)
        except ValueError:  # whose text may repeat a password
            raise ConfigError(f"engine address {without_password(url)!r} is no address") from None
        self._paths: dict[str, yarl.URL] = {}
        # No limit on connections here: what may be in flight is counted by the caller, before any deadline
        # starts, so that a full pool is never taken for a failing engine, and an abort never waits for a place.
        # Idle connections are dropped before the server does it (uvicorn: 5 s) while a request is on its way.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Accept"),
            read_bufsize=2**20,
        )

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = _JSON,
        hear: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """One try, without a time limit of its own. `hear` is given the data of each server-sent event, where the answer
        is made of those; its body is then empty. Raises LinkLost, and whatever `hear` raises."""
        if self._session.closed:
            # The engine was replaced while this call, or its retry, was on its way.
            raise LinkLost("this client was closed", arrived=False)
        url = self._paths.get(path)
        if url is None:
            url = self._paths[path] = yarl.URL(self.url + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                if (reply.content_length or 0) > _LARGEST_REPLY:
                    raise LinkLost(f"a reply of {reply.content_length} bytes", arrived=True)
                if hear is not None and reply.content_type == "text/event-stream":
                    await _heard(reply.content, hear)
                    return Answer(reply.status, b"")
                content = await _whole(reply)
                return Answer(reply.status, content, retry_after_s(reply.headers.get("Retry-After")))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LinkLost(f"cannot connect: {_cause(error)}", arrived=False) from error
        except RuntimeError as error:
            if not self._session.closed:
                raise
            raise LinkLost("this client was closed", arrived=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkLost(f"the connection broke: {_cause(error)}", arrived=True) from error

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        within_s: float | None = None,
        repeatable: bool = True,
        waits_again: bool = True,
    ) -> Answer:
        """A control call, tried again where that is safe; finite in all. Returns any answer below 500.

        `repeatable` says that a second one does no harm when the first had arrived and its answer was lost;
        `waits_again`, that one that was not answered in time is worth another wait. EngineUnavailable when there was no
        answer in time.
        EngineError names the engine, the route and the last cause.
        """
        limit_s = self.limits.admin_s if within_s is None else within_s
        content = None if body is None else msgspec.json.encode(body)
        failed = 0
        while True:
            failed += 1
            wait_s: float | None = None
            kind: type[EngineError] = EngineError
            try:
                async with asyncio.timeout(limit_s):
                    answer = await self.send(method, path, content)
            except TimeoutError:
                cause, kind = f"no answer within {limit_s:g} s", EngineUnavailable
                wait_s = self.retry.wait_s(failed) if repeatable and waits_again else None
            except LinkLost as lost:
                cause = str(lost)
                wait_s = self.retry.wait_s(failed) if repeatable or not lost.arrived else None
            else:
                if answer.status != 429 and (answer.status < 500 or answer.status == 501):
                    return answer
                cause = self._refusal(answer)
                if is_transient(answer.status, answer.body) and (repeatable or answer.status in (429, 503)):
                    wait_s = self.retry.wait_s(failed, answer.retry_after_s)
            if wait_s is None:
                raise kind(f"{self.name}: {method} {path}: {cause} (try {failed})")
            await asyncio.sleep(wait_s)

    async def demand(self, method: str, path: str, body: Any = None, **kind: Any) -> Answer:
        """`call`, and EngineError for anything but success."""
        answer = await self.call(method, path, body, **kind)
        if answer.status != 200:
            raise EngineError(f"{self.name}: {method} {path}: {self._refusal(answer)}")
        return answer

    async def close(self) -> None:
        await self._session.close()

    def _refusal(self, answer: Answer) -> str:
        return f"answered {answer.status}: {error_text(answer.body) or 'without a word'}"


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    """The body. LinkLost where it has no length of its own and does not end."""
    if reply.content_length is not None:
        return await reply.read()
    parts, size = [], 0
    async for part in reply.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _LARGEST_REPLY:
            raise LinkLost(f"a reply of more than {_LARGEST_REPLY} bytes", arrived=True)
    return b"".join(parts)


async def _heard(content: aiohttp.StreamReader, hear: Callable[[bytes], None]) -> None:
    """Hand over the data of each event: servers of models write one line of it an event."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                hear(line[5:].strip())
        if len(rest) > _LARGEST_REPLY:
            raise LinkLost(f"an event of more than {_LARGEST_REPLY} bytes", arrived=True)


def _cause(error: BaseException) -> str:
    """Why, without what the engine's name says already: aiohttp repeats the address, and names TLS where there is none."""
    inner = getattr(error, "os_error", None)
    if not isinstance(inner, OSError) or isinstance(inner, ssl.SSLError):
        return without_password(str(error)) or type(error).__name__
    if isinstance(inner, socket.gaierror) or not inner.errno:
        return inner.strerror or str(inner) or type(inner).__name__
    return os.strerror(inner.errno)
