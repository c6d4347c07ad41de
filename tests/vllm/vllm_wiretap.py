"""What a run sent to a real vLLM and had from it, and what its trainer reads: seen from outside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from vllm_kit import Server

from paceline.transport.reader import read_batches

Call = tuple[list[int], list[int], list[float], list[dict[str, Any]]]
"""Ids sent, ids received, their logprobs, and the spans of versions."""


class Wiretap:
    """A proxy that keeps every generate call; it knows nothing of Paceline."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls: list[Call] = []
        self.loads = self.probes = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wiretap]:
        limits = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=limits) as self._session:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{tail:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        sent = await request.read()
        url = f"{self.server.url}{request.path_qs}"
        headers = {"Content-Type": "application/json"}
        async with self._session.request(request.method, url, data=sent, headers=headers) as reply:
            got = await reply.read()
        if request.path == "/inference/v1/generate" and reply.status == 200:
            asked = json.loads(sent)
            if asked["request_id"].startswith("probe-"):
                self.probes += 1
                return web.Response(body=got, content_type="application/json")
            choice = json.loads(got)["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            spans = choice["weight_versions"]
            self.calls.append((asked["token_ids"], choice["token_ids"], logprobs, spans))
        self.loads += request.path == "/collective_rpc" and reply.status == 200
        return web.Response(body=got, status=reply.status, content_type="application/json")


def number(label: str) -> int:
    """A server that has not been updated yet calls its weights `default`."""
    return 0 if label == "default" else int(label.removeprefix("v"))


def sequences(run_dir: Path, step: int) -> Iterator[tuple[Any, Any, Any]]:
    """Ids, trainable mask and logprobs of each sequence of a batch, as a trainer reads them."""
    for batch in read_batches(run_dir, start_step=step, stop=lambda: False):
        for packed in batch.micro_batches:
            ends = np.cumsum(packed.lengths)
            for end, length in zip(ends, packed.lengths, strict=True):
                at = slice(int(end - length), int(end))
                yield packed.token_ids[at], packed.trainable[at], packed.logprobs[at]
        return
