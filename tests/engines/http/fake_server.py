"""A scripted server of vLLM's routes: does what a real one will not do on demand.

    async with FakeServer() as fake:
        fake.say(GENERATE, Say(status=429, headers={"Retry-After": "2"}), Say(breaks="before"))
        ...                     # the first generate call is refused, the second loses its connection, others work

Every call is kept in `fake.calls`. Without a script, each route answers as a healthy server does.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 6.4e+02
vllm:generation_tokens_total{engine="0",model_name="policy"} 12345.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",kv_cache_size_tokens="8192",num_gpu_blocks="512"} 1.0
"""


@dataclass
class Call:
    path: str
    query: str
    body: Any
    headers: dict[str, str]
    at: float


@dataclass
class Say:
    """One scripted answer. What is not set is as a healthy server does it."""

    status: int = 200
    body: Any = None
    """JSON, or bytes as they are; None for the healthy body (or an error text when `status` is one)."""
    headers: dict[str, str] = field(default_factory=dict)
    until: asyncio.Event | None = None
    """Wait for this before anything is answered: for ever, if nobody sets it."""
    breaks: Literal["before", "middle", "event"] | None = None
    """Close the connection before any byte, or in the middle of the body; of a stream, after an event that says so."""
    acts: bool = True
    """Whether the call has its effect, whatever is answered."""


class FakeServer:
    """Use as an async context manager; `url` is its address."""

    def __init__(
        self,
        *,
        model: str = "policy",
        max_model_len: int = 4096,
        missing: tuple[str, ...] = (),
        reply: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        raw_logprobs: bool = False,
        routes_loading: bool = True,
    ) -> None:
        self.model, self.max_model_len, self.missing = model, max_model_len, missing
        self.reply, self.raw_logprobs, self.phases = reply, raw_logprobs, routes_loading
        self.calls: list[Call] = []
        self.label = "default"
        self.loaded: Any = ""
        self.adapters: dict[str, str] = {}
        self.group: dict[str, Any] = {}
        self.paused = False
        self.metrics = METRICS
        self.running: dict[str, asyncio.Event] = {}
        """Generate calls that have not been answered, by request id; set to abort one."""
        self.peak = 0
        self.dropped = 0
        """Generate calls whose client went away."""
        self.streams = True
        """Whether it knows of streams."""
        self.hold: asyncio.Event | None = None
        """While set up and not set, generate calls but for probes wait for it, or for their abort."""
        self.url = ""
        self._script: dict[str, deque[Say]] = defaultdict(deque)

    def say(self, path: str, *answers: Say) -> None:
        """Script the next answers of a route."""
        self._script[path].extend(answers)

    def paths(self, *only: str) -> list[str]:
        return [call.path for call in self.calls if not only or call.path in only]

    async def __aenter__(self) -> FakeServer:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        # As vLLM's server does it: a client that goes away cancels its request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for event in self.running.values():
            event.set()
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        data = await request.read()
        body = json.loads(data) if data else None
        loop = asyncio.get_running_loop()
        self.calls.append(Call(path, request.query_string, body, dict(request.headers), loop.time()))
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        script = self._script[path]
        say = script.popleft() if script else Say()
        if say.until is not None:
            await say.until.wait()
        healthy: Any = {}
        if say.acts and ((say.status == 200 and say.body is None) or say.breaks):
            healthy = await self._act(request, path, body)
            if isinstance(healthy, web.Response):
                return healthy
        if say.breaks == "before":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        content = say.body if say.body is not None else healthy
        if say.status != 200 and say.body is None:
            content = {"error": {"message": f"scripted {say.status}"}}
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        if body is not None and body.get("stream") and say.status == 200 and self.streams:
            return await self._stream(request, content, say)
        if say.breaks == "middle":
            stream = web.StreamResponse(headers={"Content-Length": str(len(raw))})
            await stream.prepare(request)
            await stream.write(raw[: len(raw) // 2])
            assert request.transport is not None
            request.transport.abort()
            return stream
        return web.Response(
            body=raw, status=say.status, headers={"Content-Type": "application/json", **say.headers}
        )

    async def _stream(self, request: web.Request, whole: dict[str, Any], say: Say) -> web.StreamResponse:
        """The answer as vLLM streams it: an event a token, versions in the last; what breaks, breaks after two tokens."""
        choice = whole["choices"][0]
        entries = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
        name = "content" if "content" in choice["logprobs"] else "token_logprobs"
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)

        async def tell(event: Any) -> None:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        for at, (token, entry) in enumerate(zip(choice["token_ids"], entries, strict=True)):
            if at == 2 and say.breaks is not None:
                if say.breaks == "event":
                    await tell({"error": {"message": "engine core died", "code": 500}})
                assert request.transport is not None
                request.transport.abort()
                return stream
            last = at == len(entries) - 1
            part = {"index": 0, "token_ids": [token], "logprobs": {name: [entry]}, "finish_reason": None}
            await tell(
                {"choices": [choice | part | {"finish_reason": choice["finish_reason"]} if last else part]}
            )
        await tell({"choices": [], "usage": whole.get("usage")})
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    async def _act(self, request: web.Request, path: str, body: Any) -> Any:
        match path:
            case "/inference/v1/generate" | "/v1/completions":
                return await self._generate(path, body)
            case "/v1/models":
                return {"data": [{"id": self.model, "max_model_len": self.max_model_len}]}
            case "/metrics":
                return self.metrics.encode()
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/start_weight_update":
                if not self.phases:
                    return web.json_response(
                        {"error": {"message": "Weight transfer not configured"}}, status=500
                    )
            case "/init_weight_transfer_engine":
                self.group = body["init_info"]
            case "/update_weights":
                self.loaded = body["update_info"].get("path") or body["update_info"]
            case "/finish_weight_update":
                self.label = body.get("weight_version", self.label)
            case "/collective_rpc":
                self.loaded = body["kwargs"]["weights_path"]
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/abort_requests":
                for name in body["request_ids"]:
                    ours = name.removeprefix("generate-tokens-").removeprefix("cmpl-").removesuffix("-0")
                    if ours != name and (event := self.running.get(ours)):
                        event.set()
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return {}

    async def _generate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name, aborted = body["request_id"], asyncio.Event()
        self.running[name] = aborted
        self.peak = max(self.peak, len(self.running))
        began = self.label
        try:
            if self.hold is not None and not name.startswith("probe-"):
                waits = [asyncio.ensure_future(e.wait()) for e in (self.hold, aborted)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            if self.reply is not None:
                return self.reply(body)
            return self.healthy(path, body, began, aborted.is_set())
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            del self.running[name]

    def healthy(self, path: str, body: dict[str, Any], began: str, aborted: bool) -> dict[str, Any]:
        """Ids 100, 101, …; the first half under the label at the start, the rest under the label now."""
        sampling = body.get("sampling_params", body)
        n = 2 if aborted else sampling["max_tokens"]
        ids = [100 + i for i in range(n)]
        lp = -1.25 if self.raw_logprobs else -0.5 / (sampling["temperature"] or 1.0)
        finish = "abort" if aborted else "length"
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None}
        if path == GENERATE:
            choice["logprobs"] = {
                "content": [{"token": f"token_id:{i}", "logprob": lp, "rank": 1} for i in ids]
            }
            half = n if began == self.label else n // 2
            spans = [(began, 0, half), (self.label, half, n)]
            choice["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans if b > a]
        else:
            choice["logprobs"] = {"token_logprobs": [lp] * n, "tokens": [f"token_id:{i}" for i in ids]}
        return {
            "id": "x",
            "choices": [choice],
            "usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
        }
