"""CPU milliseconds of the engine client for one reply: 512 tokens with ids and logprobs, 256 in flight.

The server runs in a process of its own and answers from memory; what is counted is the CPU time of this
process alone (user and system), the body's encoding and the arrays included. The same through `httpx` and the standard
library's JSON says what that is worth on the machine at hand: the ratio is comparable between machines.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.engines.http import connect
from paceline.ports import GenerateRequest, SamplingParams

Arrays: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ids and logprobs of a reply."""
Ask: TypeAlias = Callable[[int], Awaitable[Arrays]]
Client: TypeAlias = Callable[[str], AbstractAsyncContextManager[Ask]]
"""Given the server's address."""

CONCURRENCY, TOKENS, PROMPT, REPLIES = 256, 512, 256, 4096
TARGET_MS = 0.35
HTTPX_MS = 1.7
"""What `httpx` took on the machine that the target was set on."""


def rows() -> list[dict[str, Any]]:
    """The benchmark's rows: name, value, unit, target, ok, note."""
    ms, per_s = measure(_engine)
    theirs, _ = measure(_httpx)
    streamed, _ = measure(_streams, REPLIES // 8)
    note = f"{TOKENS}-token replies with ids and logprobs, {PROMPT} prompt ids, {CONCURRENCY} in flight"
    most = TARGET_MS / HTTPX_MS
    over = f"target: {TARGET_MS:g} ms over the {HTTPX_MS:g} ms of httpx it was set with"
    return [
        _row(
            "client_ms_per_reply", ms, "ms CPU", TARGET_MS, f"{note}, {per_s:.0f} replies/s beside a server"
        ),
        _row("httpx_ms_per_reply", theirs, "ms CPU", None, "the same through httpx and json"),
        _row("client_over_httpx", ms / theirs, "x", most, over),
        _row(
            "client_streamed_over_whole",
            streamed / ms,
            "x",
            None,
            "the reply as one event a token, told as it comes",
        ),
    ]


def _row(name: str, value: float, unit: str, target: float | None, note: str) -> dict[str, Any]:
    ok = None if target is None else value <= target
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "target": target,
        "ok": ok,
        "note": note,
    }


def measure(client: Client, replies: int = REPLIES) -> tuple[float, float]:
    """(CPU ms a reply, replies a second): the best of three, after one round that warms up."""
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        return asyncio.run(_measured(client, url, replies))
    finally:
        server.kill()
        server.wait()


async def _measured(client: Client, url: str, replies: int) -> tuple[float, float]:
    async with client(url) as ask:
        await _round(ask, CONCURRENCY * 2)
        gc.collect()
        gc.freeze()
        try:
            return min([await _round(ask, replies) for _ in range(3)])
        finally:
            gc.unfreeze()


async def _round(ask: Ask, replies: int) -> tuple[float, float]:
    left = iter(range(replies))

    async def worker() -> None:
        for i in left:
            token_ids, logprobs = await ask(i)
            assert len(token_ids) == len(logprobs) == TOKENS

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(CONCURRENCY)])
    return (time.process_time() - cpu) / replies * 1e3, replies / (time.perf_counter() - wall)


def _streams(url: str) -> AbstractAsyncContextManager[Ask]:
    return _engine(url, tell=lambda ids: None)


@asynccontextmanager
async def _engine(url: str, tell: Callable[[Sequence[int]], None] | None = None) -> AsyncIterator[Ask]:
    ids = np.arange(1, PROMPT + 1, dtype=np.int32) * 97
    sampling = SamplingParams(max_tokens=TOKENS, seed=1)
    engine = await connect(url, id="bench", served_name="policy", max_connections=CONCURRENCY)

    async def ask(number: int) -> Arrays:
        reply = await engine.generate(
            GenerateRequest(
                request_id=f"g{number}.m0.a0",
                token_ids=ids,
                sampling=sampling,
                session=f"g{number}",
                cache_salt="v3",
                tell=tell,
            )
        )
        return reply.token_ids, reply.logprobs

    try:
        yield ask
    finally:
        await engine.close()


@asynccontextmanager
async def _httpx(url: str) -> AsyncIterator[Ask]:
    import httpx  # of the dev extra

    ids = (np.arange(1, PROMPT + 1) * 97).tolist()
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0) as client:

        async def ask(number: int) -> Arrays:
            body = {
                "request_id": f"g{number}.m0.a0",
                "token_ids": ids,
                "sampling_params": {"max_tokens": TOKENS, "seed": 1, "logprobs": 0},
                "cache_salt": "v3",
            }
            reply = await client.post("/inference/v1/generate", json=body)
            choice = reply.raise_for_status().json()["choices"][0]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            return np.array(choice["token_ids"], np.int32), np.array(logprobs, np.float32)

        yield ask


# ---- the other process


def _reply(tokens: int) -> bytes:
    """A reply as a vLLM server writes it."""
    rng = np.random.default_rng(0)
    ids, logprobs = rng.integers(0, 150_000, tokens), -rng.exponential(0.5, tokens)
    content = [
        {"token": f"token_id:{i}", "logprob": float(lp), "bytes": None, "top_logprobs": []}
        for i, lp in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids.tolist(),
        "logprobs": {"content": content},
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": "v3", "start": 0, "end": tokens}],
    }
    usage = {"prompt_tokens": PROMPT, "prompt_tokens_details": {"cached_tokens": 240}}
    reply = {"request_id": "x", "choices": [choice], "usage": usage}
    return json.dumps(reply, separators=(",", ":")).encode()


def _stream(whole: bytes) -> bytes:
    """The same reply as the events of a stream, one a token."""
    choice = json.loads(whole)["choices"][0]
    events = []
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        part = {"index": 0, "token_ids": [token], "logprobs": {"content": [entry]}, "finish_reason": None}
        events.append({"request_id": "x", "choices": [part]})
    events[-1]["choices"][0] |= {key: choice[key] for key in ("finish_reason", "weight_versions")}
    told = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]
    return b"".join(told) + b"data: [DONE]\n\n"


class _Server(asyncio.Protocol):
    """Enough of HTTP to answer a client that sends one request at a time on a connection."""

    _models = b'{"data":[{"id":"policy","max_model_len":32768}]}'
    _long, _short = _reply(TOKENS), _reply(1)
    _events = _stream(_long)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, ended, body = self._data.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        needed = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not ended or len(body) < needed:
            return
        self._data, path, status = b"", head.split(b" ", 2)[1], b"200 OK"
        kind = b"application/json"
        if path == b"/inference/v1/generate":
            content = self._short if b'"max_tokens":1,' in body else self._long
            if b'"stream":true' in body:
                content, kind = self._events, b"text/event-stream"
        elif path == b"/v1/models":
            content = self._models
        else:
            content, status = b"{}", b"404 Not Found"
        head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (
            status,
            kind,
            len(content),
        )
        self._transport.write(head + content)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(_serve())
    else:
        for row in rows():
            print(json.dumps(row))
