"""Several servers behind a router, as one engine: calls go through the router, everything else to the servers.

    generate        ─▶ router ─▶ the server that the session hashes to (X-Session-ID)
    abort           ─▶ every server: the one that has the request stops it
    metrics         ─▶ every server, added up
    pause, weights  ─▶ every server; the version is held when all of them hold it

A router hands a control call to one server only, or to whichever it likes. Where the servers' own addresses are not
known, metrics are not read (those of one say nothing of all) and control calls rely on the router to pass them on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.domain.ids import EngineId, Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.engines.http.adapters import is_adapter
from paceline.engines.http.client import HttpEngine, connect
from paceline.engines.http.dialect import VllmDialect
from paceline.engines.http.link import Limits, Link
from paceline.engines.http.probe import models_when_up
from paceline.engines.http.retry import Retry
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest, SamplingParams

log = logging.getLogger(__name__)


class RouterEngine:
    """The Engine port. `front` speaks to the router, `servers` to each server behind it."""

    def __init__(self, front: HttpEngine, servers: Sequence[HttpEngine]) -> None:
        self._front, self._servers = front, tuple(servers)
        versions = {server.version for server in servers}
        self.is_mixed = len(versions) > 1
        """Whether the servers held different versions when they were reached: then they have to be given weights first."""
        said = [server.info for server in servers]
        kv = [info.kv_tokens for info in said]
        lengths = [info.max_model_len for info in said if info.max_model_len is not None]
        self._info = EngineInfo(
            id=front.info.id,
            kv_tokens=None if None in kv else sum(tokens for tokens in kv if tokens is not None),
            max_model_len=min(lengths, default=None),
        )
        front.holds(min(versions))

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> Version:
        return self._front.version

    @property
    def is_busy(self) -> bool:
        return self._front.is_busy or any(server.is_busy for server in self._servers)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._front.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._front.abort(request_id)

    async def load(self) -> EngineLoad:
        """Counts are added up; usage is that of the fullest server."""
        loads = await asyncio.gather(*(server.load() for server in self._servers))
        sums = {
            name: sum(getattr(load, name) for load in loads)
            for name in EngineLoad.__struct_fields__
            if name != "kv_usage"
        }
        return EngineLoad(kv_usage=max(load.kv_usage for load in loads), **sums)

    async def update_weights(self, version: Version, path: str) -> None:
        if is_adapter(path):
            raise EngineError(
                f"{self.info.id}: {path} holds a LoRA adapter; name the servers in engine.urls and leave out the router"
            )
        front, doubt, is_trusted = self._front, self._front.doubt(version), False
        try:
            # All at once: until the last of them has it, no new call is sent.
            async with front.held_off():
                done = await asyncio.gather(
                    *(server.update_weights(version, path, front.interrupt) for server in self._servers),
                    return_exceptions=True,
                )
            for error in done:
                if isinstance(error, BaseException):
                    raise error
            is_trusted = True
        finally:
            doubt.settle(is_trusted)
            if not is_trusted:
                await front.interrupt()
        front.holds(version)

    async def close(self) -> None:
        for engine in (self._front, *self._servers):
            await engine.close()


async def connect_router(
    url: str,
    servers: Sequence[str],
    *,
    id: EngineId,
    served_name: str,
    reach: Callable[..., Any] = connect,
    max_connections: int = 4096,
    limits: Limits | None = None,
    retry: Retry | None = None,
    api_key: str | None = None,
    start_s: float = 600.0,
    interrupt: bool = False,
    **rest: Any,
) -> RouterEngine:
    """Reach the router at `url` and each of `servers` behind it; `rest` is what `connect` takes for those."""
    common: dict[str, Any] = {
        "served_name": served_name,
        "limits": limits,
        "retry": retry,
        "api_key": api_key,
    }
    behind: list[HttpEngine] = []
    link = Link(url, f"router {id} ({url})", limits or Limits(), retry or Retry(), api_key)
    try:
        await models_when_up(link, start_s)
        for number, address in enumerate(servers):
            behind.append(
                await reach(
                    address,
                    id=f"{id}.{number}",
                    start_s=start_s,
                    max_connections=max_connections,
                    **common,
                    **rest,
                )
            )
        routes = {server.facts.route for server in behind}
        if len(routes) > 1:
            raise EngineError(f"{link.name}: its servers do not speak alike: {' and '.join(sorted(routes))}")
        front = HttpEngine(
            link,
            id,
            behind[0].facts,
            VllmDialect(link, served_name, routes.pop()),
            max_connections=max_connections,
            interrupt=interrupt,
            controls=[server.link for server in behind],
        )
        engine = RouterEngine(front, behind)
        one = SamplingParams(max_tokens=1)
        await front.generate(
            GenerateRequest(f"probe-{id}", np.array([1], np.int32), one, session=f"probe-{id}")
        )
    except BaseException:
        for server in behind:
            await server.close()
        await link.close()
        raise
    return engine
