"""Servers behind a router: calls through it, metrics, aborts, pauses and weights to each of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from fake_server import GENERATE, FakeServer, Say
from test_http_generate import LIMITS, QUICK, until

from paceline.cli.checks import diagnose
from paceline.cli.engines import RunEngines
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.core.admission.choice import admission_of
from paceline.core.fleet import EngineState
from paceline.domain.events import LoadReported
from paceline.engines.http import RouterEngine, connect, connect_router
from paceline.errors import EngineError
from paceline.ports import GenerateRequest, SamplingParams
from paceline.runtime.loads import poll_load


class FakeRouter:
    """Sends calls of one session to one server, and everything else to whichever is next."""

    def __init__(self, servers: list[FakeServer]) -> None:
        self._servers = servers
        self._turn = itertools.count()
        self._sessions: dict[str, int] = {}
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeRouter]:
        async with aiohttp.ClientSession() as self._session:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{tail:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        session = request.headers.get("X-Session-ID")
        at = next(self._turn) if session is None else self._sessions.setdefault(session, len(self._sessions))
        url = f"{self._servers[at % len(self._servers)].url}{request.path_qs}"
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            request.method, url, data=await request.read(), headers=headers
        ) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")


@asynccontextmanager
async def a_fleet(**options: Any) -> AsyncIterator[tuple[RouterEngine, list[FakeServer]]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(2)]
        router = await stack.enter_async_context(FakeRouter(servers).running())
        engine = await connect_router(
            router.url,
            [server.url for server in servers],
            id="vllm-0",
            served_name="policy",
            limits=LIMITS,
            retry=QUICK,
            start_s=5.0,
            **options,
        )
        for server in servers:
            server.calls.clear()
        try:
            yield engine, servers
        finally:
            await engine.close()


def request(name: str, session: str, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(name, np.arange(4, dtype=np.int32), SamplingParams(max_tokens=tokens), session)


async def test_the_calls_of_a_session_reach_one_server_by_way_of_the_router() -> None:
    async with a_fleet() as (engine, servers):
        for n in range(6):
            await engine.generate(request(f"r{n}", f"g{n % 2}"))
        seen = [{c.body["request_id"][1:] for c in s.calls if c.path == GENERATE} for s in servers]
        assert sorted(map(sorted, seen)) == [["0", "2", "4"], ["1", "3", "5"]]


async def test_metrics_are_those_of_all_servers() -> None:
    async with a_fleet() as (engine, servers):
        load, alone = await engine.load(), None
        async with AsyncExitStack() as stack:
            one = await connect(servers[0].url, id="e", served_name="policy", limits=LIMITS, start_s=5.0)
            stack.push_async_callback(one.close)
            alone = await one.load()
            assert engine.info.kv_tokens == 2 * (one.info.kv_tokens or 0) > 0
        assert (load.running, load.generated_tokens) == (2 * alone.running, 2 * alone.generated_tokens)
        assert load.kv_usage == alone.kv_usage


async def test_a_version_is_held_when_every_server_has_it_and_not_before() -> None:
    async with a_fleet() as (engine, servers):
        gate = asyncio.Event()
        servers[1].say("/update_weights", Say(until=gate))
        update = asyncio.ensure_future(engine.update_weights(1, "/weights/v1"))
        while servers[0].label != "v1":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert engine.version == 0
        gate.set()
        await update
        assert engine.version == 1
        assert [(s.label, s.loaded, s.paused) for s in servers] == [("v1", "/weights/v1", False)] * 2


async def test_a_server_that_cannot_load_is_named_and_the_version_does_not_flip() -> None:
    async with a_fleet() as (engine, servers):
        servers[1].say("/update_weights", Say(status=500, body={"error": {"message": "disk full"}}))
        with pytest.raises(EngineError, match=rf"vllm-0.1 \({servers[1].url}\).*disk full"):
            await engine.update_weights(1, "/weights/v1")
        assert engine.version == 0
        assert not any(server.paused for server in servers)


async def test_an_abort_reaches_the_server_that_has_the_request() -> None:
    async with a_fleet() as (engine, servers):
        for server in servers:
            server.hold = asyncio.Event()
        calls = [asyncio.ensure_future(engine.generate(request(f"r{n}", f"g{n}", 50))) for n in range(2)]
        while sum(len(server.running) for server in servers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for n in range(2):
            await engine.abort(f"r{n}")
        replies = await asyncio.gather(*calls)
        assert [(reply.finish, len(reply.token_ids)) for reply in replies] == [("abort", 2)] * 2


async def test_interrupted_calls_come_back_before_any_server_loads() -> None:
    async with a_fleet(interrupt=True) as (engine, servers):
        for server in servers:
            server.hold = asyncio.Event()
        calls = [asyncio.ensure_future(engine.generate(request(f"r{n}", f"g{n}", 50))) for n in range(2)]
        while sum(len(server.running) for server in servers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.update_weights(1, "/weights/v1")
        assert [reply.versions for reply in await asyncio.gather(*calls)] == [((0, 2),)] * 2
        for server in servers:
            paths = server.paths("/abort_requests", "/pause")
            assert paths.index("/pause") > max(i for i, p in enumerate(paths) if p == "/abort_requests")


async def test_a_router_whose_servers_are_not_known_gives_no_metrics() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(2)]
        router = await stack.enter_async_context(FakeRouter(servers).running())
        engine = await connect(
            router.url, id="e0", served_name="policy", limits=LIMITS, start_s=5.0, is_router=True
        )
        stack.push_async_callback(engine.close)
        assert engine.info.kv_tokens is None
        with pytest.raises(
            EngineError, match="is a router, whose metrics say nothing of the servers behind it"
        ):
            await engine.load()


CONFIG = """
[model]
name = "pkg:paceline/assets/small_policy"
[[env]]
id = "reverse-text"
[batch]
rollouts = 16
seq_len = 512
[admission]
type = "adaptive"
[engine]
type = "vllm"
urls = ["{url}"]
router = "{url}"
"""


async def test_a_run_that_knows_a_router_alone_says_so_aloud_and_goes_by_latency(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(2)]
        router = await stack.enter_async_context(FakeRouter(servers).running())
        path = tmp_path / "run.toml"
        path.write_text(CONFIG.format(url=router.url))
        loaded = load(RunConfig, [path])
        with caplog.at_level("WARNING"):
            engines = RunEngines(loaded.value, tmp_path, [], ())
            await engines.start(0, tmp_path)
            stack.push_async_callback(engines.close)
        assert "names the router alone" in caplog.text
        assert "admission goes by latency" in caplog.text

        (slot,) = engines.slots.values()
        readings: list[LoadReported] = []
        polling = asyncio.ensure_future(poll_load(slot, readings.append, interval_s=0.01))
        await until(lambda: len(readings) >= 3)
        polling.cancel()
        assert {reading.load for reading in readings} == {None}
        admission = admission_of(loaded.value, {})
        admission.joined(slot.info)
        for second, _ in enumerate(readings[:3]):
            admission.observe(EngineState(slot.info.id, 0, True, 0, []), None, 5.0 * second)
        assert "gives no metrics: going by latency and refusals" in admission.reason(slot.info.id)

        warned = [f for f in await diagnose(loaded, limit_s=60) if f.level == "warning"]
        assert [f.what for f in warned if "router" in f.what] == [
            f"engine {router.url} is a router whose servers are not known"
        ]
