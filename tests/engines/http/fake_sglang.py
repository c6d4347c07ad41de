"""A scripted server of SGLang's native routes, as its documentation has them. Scripts work as in `fake_server`."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from typing import Any

from aiohttp import web
from fake_server import Call, Say

METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="policy",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="policy",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="policy",tp_rank="0"} 0.25
sglang:num_retracted_reqs{engine_type="unified",model_name="policy",tp_rank="0"} 9.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="policy",tp_rank="0"} 1.0
sglang:max_total_num_tokens{engine_type="unified",model_name="policy",tp_rank="0"} 8192.0
sglang:prompt_tokens_total{model_name="policy"} 1000.0
sglang:cached_tokens_total{model_name="policy"} 640.0
sglang:generation_tokens_total{model_name="policy"} 12345.0
"""


class FakeSglang:
    """Use as an async context manager; `url` is its address."""

    def __init__(
        self,
        *,
        model: str = "policy",
        missing: tuple[str, ...] = (),
        spans: bool = True,
        incremental: bool = True,
    ) -> None:
        """`incremental`: started with --incremental-streaming-output."""
        self.model, self.missing, self.spans, self.incremental = model, missing, spans, incremental
        self.calls: list[Call] = []
        self.label, self.loaded, self.paused = "default", "", False
        self.metrics = METRICS
        self.hold: asyncio.Event | None = None
        self.running: dict[str, asyncio.Event] = {}
        self.peak = 0
        self.url = ""
        self._script: dict[str, deque[Say]] = defaultdict(deque)

    def say(self, path: str, *answers: Say) -> None:
        self._script[path].extend(answers)

    def paths(self, *only: str) -> list[str]:
        return [call.path for call in self.calls if not only or call.path in only]

    async def __aenter__(self) -> FakeSglang:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for event in self.running.values():
            event.set()
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        data, path = await request.read(), request.path
        body = json.loads(data) if data else None
        now = asyncio.get_running_loop().time()
        self.calls.append(Call(path, request.query_string, body, dict(request.headers), now))
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        say = self._script[path].popleft() if self._script[path] else Say()
        if say.until is not None:
            await say.until.wait()
        healthy: Any = {}
        if say.acts and ((say.status == 200 and say.body is None) or say.breaks):
            healthy = await self._act(request, body)
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
        if body and body.get("stream") and say.status == 200 and not isinstance(content, bytes):
            return await self._stream(request, content, say)
        if say.breaks == "middle":
            stream = web.StreamResponse(headers={"Content-Length": str(len(raw))})
            await stream.prepare(request)
            await stream.write(raw[: len(raw) // 2])
            assert request.transport is not None
            request.transport.abort()
            return stream
        headers = {"Content-Type": "application/json", **say.headers}
        return web.Response(body=raw, status=say.status, headers=headers)

    async def _stream(self, request: web.Request, whole: dict[str, Any], say: Say) -> web.StreamResponse:
        """The answer as SGLang 0.5.23 streams it: an event a token; lists hold what is new where it is `incremental`, else
        all from the first on; spans in the last; what breaks, breaks after two tokens."""
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)

        async def tell(event: Any) -> None:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        ids, meta = whole["output_ids"], whole["meta_info"]
        entries = meta["output_token_logprobs"]
        for at in range(1, len(ids) + 1):
            if at == 3 and say.breaks is not None:
                if say.breaks == "event":
                    await tell({"error": {"message": "scheduler died", "code": 500, "retryable": False}})
                assert request.transport is not None
                request.transport.abort()
                return stream
            begins = at - 1 if self.incremental else 0
            part = {
                **meta,
                "completion_tokens": at,
                "output_token_logprobs": entries[begins:at],
                "output_token_logprobs_length": at,
            }
            if at < len(ids):
                part["finish_reason"] = None
                part.pop("weight_versions", None)
            await tell({"text": "…", "output_ids": ids[begins:at], "meta_info": part})
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    async def _act(self, request: web.Request, body: Any) -> Any:
        match request.path, request.method:
            case "/generate", "POST":
                return await self._generate(body)
            case "/v1/models", "GET":
                return {"data": [{"id": self.model, "max_model_len": 4096}]}
            case "/metrics", "GET":
                return self.metrics.encode()
            case (("/model_info" | "/get_weight_version"), "GET"):
                return {"weight_version": self.label, "model_path": "/m"}
            case "/server_info", "GET":
                facts = {"max_total_num_tokens": 8192, "context_length": 4096}
                return facts | ({"incremental_streaming_output": True} if self.incremental else {})
            case "/pause_generation", "POST":
                self.paused = True
            case "/continue_generation", "POST":
                self.paused = False
            case "/update_weights_from_disk", "POST":
                self.loaded, self.label = body["model_path"], body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights."}
            case "/abort_request", "POST":
                if event := self.running.get(body["rid"]):
                    event.set()
            case (("/pause_generation" | "/continue_generation" | "/update_weights_from_disk"), _):
                return web.json_response({"detail": "Method Not Allowed"}, status=405)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return {"status": "ok"}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        name, aborted = body["rid"], asyncio.Event()
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
            return self.healthy(body, began, aborted.is_set())
        finally:
            del self.running[name]

    def healthy(self, body: dict[str, Any], began: str, aborted: bool) -> dict[str, Any]:
        sampling = body["sampling_params"]
        n = 2 if aborted else sampling["max_new_tokens"]
        ids, logprob = [100 + i for i in range(n)], -0.5 / (sampling["temperature"] or 1.0)
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "abort", "message": "Aborted"}
            if aborted
            else {"type": "length", "length": n},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": n,
            "cached_tokens": 3,
            "weight_version": self.label,
            "output_token_logprobs": [[logprob, i, None] for i in ids],
        }
        if self.spans:
            half = n if began == self.label else n // 2
            spans = [(began, 0, half), (self.label, half, n)]
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans if b > a]
        return {"text": "…", "output_ids": ids, "meta_info": meta}
