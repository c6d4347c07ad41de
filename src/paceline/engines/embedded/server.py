"""The engine over HTTP, with vLLM's routes, fields and metric names, so that one client serves both.

    main thread: event loop, parsing, JSON ──inbox──► engine thread: run inbox, step, run inbox, step, ...
                        ▲                                   │
                        └──────── call_soon_threadsafe ─────┘

Only the engine thread touches the engine. Everything posted to the inbox runs there between two steps.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from aiohttp import web

from paceline.engines.embedded.engine import Engine, PauseMode
from paceline.engines.embedded.model import Decoder
from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.sampling import SamplingParams
from paceline.engines.embedded.scheduler import Request, RequestError
from paceline.engines.embedded.thread import EngineThread
from paceline.errors import ConfigError, InvariantError, WireError

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 2**20


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a route is sent. What vLLM would do and this engine does not is refused by name, never ignored."""


class CompletionBody(SamplingParams, forbid_unknown_fields=True, kw_only=True):
    prompt: list[int] | str
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    user: str | None = None
    return_tokens_as_token_ids: bool = True
    """Accepted; tokens are always named `token_id:<id>`."""
    stream: bool = False
    echo: bool = False


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool = False


class GenerateBody(_Body):
    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None = None
    model: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class AbortBody(_Body):
    request_ids: list[str] | None = None


class WeightsPath(_Body):
    weights_path: str


class ReloadBody(_Body):
    method: Literal["reload_weights"]
    kwargs: WeightsPath
    args: list[Any] = []
    timeout: float | None = None


class NewVersionBody(_Body):
    new_version: str


class UpdatePath(_Body):
    path: str


class UpdateBody(_Body):
    update_info: UpdatePath


class FinishBody(_Body):
    weight_version: str


class Server:
    """Routes. Needs a running event loop when constructed, for the engine thread answers through it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.model_name = engine, engine.options.served_model_name
        token = engine.options.token
        self._secret = f"Bearer {token}".encode() if token else b""
        self.thread = EngineThread(engine)
        self._live: set[str] = set()
        self._staged: Decoder | None = None
        self._updating = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        post, get = app.router.add_post, app.router.add_get
        post("/v1/completions", self.completions)
        post("/inference/v1/generate", self.generate)
        get("/health", self.health)
        get("/v1/models", self.models)
        get("/metrics", self.metrics)
        post("/pause", self.pause)
        post("/resume", self.resume)
        get("/is_paused", self.is_paused)
        post("/abort_requests", self.abort_requests)
        post("/reset_prefix_cache", self.reset_prefix_cache)
        get("/weight_info", self.weight_info)
        post("/collective_rpc", self.collective_rpc)
        post("/update_weight_version", self.update_weight_version)
        post("/init_weight_transfer_engine", self.init_weight_transfer_engine)
        post("/start_weight_update", self.start_weight_update)
        post("/update_weights", self.update_weights)
        post("/finish_weight_update", self.finish_weight_update)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._secret and request.path != "/health" and not hmac.compare_digest(given, self._secret):
            return _error(401, "a Bearer token is needed")
        try:
            return await handler(request)
        except (RequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, str(error))
        except (ConfigError, WireError) as error:
            return _error(422, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)

    # ---- generation

    async def completions(self, http: web.Request) -> web.Response:
        body = await _body(http, CompletionBody)
        prompt = body.prompt
        if isinstance(prompt, str):
            if self.engine.tokenizer is None:
                raise RequestError(
                    "a text prompt needs a tokenizer, and the model has none: send a list of token ids"
                )
            prompt = self.engine.tokenizer.encode(prompt).ids
        for name in ("echo", "stream"):
            if getattr(body, name):
                raise RequestError(f"{name}=true is not supported by the embedded engine on this route")
        done = await self._run(http, body, "cmpl-", prompt, body)
        choice: dict[str, Any] = {"index": 0, "text": self.engine.text(done), "logprobs": None} | _ending(
            done
        )
        if body.logprobs is not None:
            tokens = [f"token_id:{id}" for id in done.output]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": done.logprobs}
        if body.return_token_ids:
            choice |= {"token_ids": done.output, "prompt_token_ids": done.ids[: done.prompt_tokens]}
        return _json({"id": done.id, "object": "text_completion", "choices": [choice], **self._facts(done)})

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http, GenerateBody)
        if body.stream:
            return await self._stream(http, body)
        done = await self._run(http, body, "", body.token_ids, body.sampling_params)
        choice = {
            **_tokens(done, 0, len(done.logprobs)),
            **_ending(done),
            "weight_versions": self._spans(done),
        }
        return _json({"request_id": done.id, "choices": [choice], **self._facts(done)})

    async def _stream(self, http: web.Request, body: GenerateBody) -> web.StreamResponse:
        """As vLLM: events of one choice each, versions in the last of them; then the counts, if they are wanted."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        seen: list[Request] = []

        def sampled(request: Request) -> None:  # on the engine thread
            if not seen:
                seen.append(request)
            loop.call_soon_threadsafe(news.set)

        running = loop.create_task(
            self._run(http, body, "", body.token_ids, body.sampling_params, on_token=sampled)
        )
        running.add_done_callback(lambda _: news.set())
        try:
            await news.wait()
            if running.done():
                running.result()  # what is refused has its status
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await stream.prepare(http)
            told = 0
            while not running.done():
                news.clear()
                (request,) = seen
                # The thread appends the id first: what has a logprob is there whole.
                told, start = len(request.logprobs), told
                if told > start:
                    choice = {**_tokens(request, start, told), "finish_reason": None}
                    await stream.write(_event({"request_id": request.id, "choices": [choice]}))
                await news.wait()
            done = running.result()
            last = {**_tokens(done, told, len(done.logprobs)), **_ending(done)}
            last["weight_versions"] = self._spans(done)
            await stream.write(_event({"request_id": done.id, "choices": [last]}))
            if body.stream_options.include_usage:
                await stream.write(_event({"request_id": done.id, "choices": [], **self._facts(done)}))
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
            return stream
        finally:
            # Nothing, if it is done. No task group: it would wrap what is refused, and a connection that broke, in an error
            # of its own. What ended the stream is on its way up already.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _spans(self, done: Request) -> list[dict[str, Any]]:
        return [
            {"version": v, "start": start, "end": end} for v, start, end in self.engine.version_spans(done)
        ]

    async def _run(
        self,
        http: web.Request,
        body: CompletionBody | GenerateBody,
        prefix: str,
        prompt: list[int],
        params: SamplingParams,
        on_token: Callable[[Request], object] | None = None,
    ) -> Request:
        if body.model not in (None, self.model_name):
            raise web.HTTPNotFound(
                text=f"there is no model {body.model!r}: this engine serves {self.model_name!r}"
            )
        id = prefix + (http.headers.get("X-Request-Id") or body.request_id or uuid.uuid4().hex)
        if id in self._live:
            raise RequestError(f"request {id} is already in flight")

        def start(reply: Callable[[Request], object]) -> None:
            request.on_done = reply
            self.engine.add(request)

        request = self.engine.request(id, prompt, params, lambda _request: None, body.cache_salt)
        request.on_token = on_token
        self._live.add(id)
        try:
            return await self.thread.answer(start)
        except asyncio.CancelledError:  # the client is gone
            self.thread.post(lambda: self.engine.abort({id}))
            raise
        finally:
            self._live.discard(id)

    def _facts(self, done: Request) -> dict[str, Any]:
        first_run, first_token = done.first_run or done.finished, done.first_token or done.finished
        return {
            "model": self.model_name,
            "usage": {
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": len(done.logprobs),
                "total_tokens": len(done.ids),
                "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
            },
            "cached_tokens": done.cached_tokens,
            "timing": {
                "queue_s": first_run - done.arrived,
                "prefill_s": first_token - first_run,
                "decode_s": done.finished - first_token,
            },
        }

    # ---- facts

    async def health(self, _http: web.Request) -> web.Response:
        return web.Response(status=503 if self.thread.failed.done() else 200)

    async def models(self, _http: web.Request) -> web.Response:
        card = {"id": self.model_name, "object": "model", "max_model_len": self.engine.max_len}
        return _json({"object": "list", "data": [{**card, "root": str(self.engine.options.model)}]})

    async def weight_info(self, _http: web.Request) -> web.Response:
        return _json({"weight_version": self.engine.weight_version})

    async def metrics(self, _http: web.Request) -> web.Response:
        engine, scheduler = self.engine, self.engine.scheduler
        counters, label = scheduler.counters, f'{{model_name="{self.model_name}"}}'
        values = [
            ("gauge", "vllm:kv_cache_usage_perc", scheduler.pool.referenced / engine.num_blocks),
            ("gauge", "vllm:num_requests_running", len(scheduler.running)),
            ("gauge", "vllm:num_requests_waiting", len(scheduler.waiting) + len(engine.held)),
            ("counter", "vllm:num_preemptions_total", counters.preemptions),
            ("counter", "vllm:prefix_cache_queries_total", counters.prefix_queries),
            ("counter", "vllm:prefix_cache_hits_total", counters.prefix_hits),
            ("counter", "vllm:prompt_tokens_total", counters.prompt_tokens),
            ("counter", "vllm:generation_tokens_total", counters.generation_tokens),
            ("counter", "paceline:recomputed_tokens_total", counters.recomputed_tokens),
            ("counter", "paceline:engine_steps_total", counters.steps),
        ]
        size = engine.block_size
        info = f'kv_cache_size_tokens="{engine.num_blocks * size}",num_gpu_blocks="{engine.num_blocks}",block_size="{size}"'
        lines = [f"# TYPE {name} {kind}\n{name}{label} {value}\n" for kind, name, value in values]
        lines.append(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{info}}} 1\n")
        return web.Response(text="".join(lines), content_type="text/plain")

    # ---- control

    async def pause(self, http: web.Request) -> web.Response:
        mode: PauseMode = msgspec.convert(http.query.get("mode", "abort"), PauseMode)
        clear = msgspec.convert(http.query.get("clear_cache", "true"), bool, strict=False)

        def pause(reply: Callable[[str], object]) -> None:
            self.engine.pause(mode, clear, lambda: reply("paused"))

        return _json({"status": await self.thread.answer(pause)})

    async def resume(self, _http: web.Request) -> web.Response:
        await self.thread.call(self.engine.resume)
        return _json({"status": "resumed"})

    async def is_paused(self, _http: web.Request) -> web.Response:
        return _json({"is_paused": self.engine.paused is not None})

    async def abort_requests(self, http: web.Request) -> web.Response:
        named, ids = (await _body(http, AbortBody)).request_ids, None
        if named is not None:
            # vLLM only knows its internal names; the ids that clients chose are as good here.
            forms = [(id, id.removeprefix("generate-tokens-"), f"cmpl-{id}") for id in named]
            ids = {form for each in forms for form in each}
        return _json({"aborted": await self.thread.call(lambda: self.engine.abort(ids))})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """As in vLLM: refused while requests run, unless they may be made to recompute."""
        also_running = http.query.get("reset_running_requests", "false") == "true"

        def reset() -> bool:
            if self.engine.scheduler.running and not also_running:
                return False
            self.engine.scheduler.drop_kv()
            return True

        return _json({"success": await self.thread.call(reset)})

    # ---- weights

    async def collective_rpc(self, http: web.Request) -> web.Response:
        body = await _body(http, ReloadBody)
        decoder = await self._load(body.kwargs.weights_path)
        await self.thread.call(lambda: self.engine.swap(decoder))
        return _json({"results": [None]})

    async def update_weight_version(self, http: web.Request) -> web.Response:
        version = (await _body(http, NewVersionBody)).new_version
        await self.thread.call(lambda: self.engine.relabel(version))
        return _json({"success": True, "weight_version": version})

    async def init_weight_transfer_engine(self, http: web.Request) -> web.Response:
        """Nothing to set up here: weights come from a directory. vLLM needs the call, so clients make it."""
        await http.read()
        return _json({"message": "weight transfer initialized"})

    async def start_weight_update(self, http: web.Request) -> web.Response:
        await http.read()
        self._updating, self._staged = True, None
        return _json({"message": "weight update started"})

    async def update_weights(self, http: web.Request) -> web.Response:
        body = await _body(http, UpdateBody)
        if not self._updating:
            raise web.HTTPConflict(text="no weight update is under way: POST /start_weight_update first")
        self._staged = None
        self._staged = await self._load(body.update_info.path)
        return _json({"message": "weights loaded"})

    async def finish_weight_update(self, http: web.Request) -> web.Response:
        """Weights and version change together, between two steps; without loaded weights neither does."""
        version, staged = (await _body(http, FinishBody)).weight_version, self._staged
        if staged is None:
            raise web.HTTPConflict(text="no weights were loaded since /start_weight_update: nothing changes")
        self._updating, self._staged = False, None
        await self.thread.call(lambda: self.engine.swap(staged, version))
        return _json({"message": "weight update finished", "weight_version": version})

    async def _load(self, directory: str) -> Decoder:
        return await asyncio.to_thread(self.engine.load, Path(directory))


async def _body(http: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await http.read() or b"{}", type=kind)


def _ending(done: Request) -> dict[str, Any]:
    return {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}


def _tokens(request: Request, start: int, end: int) -> dict[str, Any]:
    """Sampled tokens of a choice, with logprobs where those are asked for."""
    first = request.prompt_tokens
    ids, logprobs = request.ids[first + start : first + end], request.logprobs[start:end]
    content = [
        {"token": f"token_id:{id}", "token_id": id, "logprob": logprob}
        for id, logprob in zip(ids, logprobs, strict=True)
    ]
    wanted = request.params.logprobs is not None
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content} if wanted else None}


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


async def serve(options: EngineOptions) -> None:
    """Serve until SIGTERM or SIGINT; says on stdout, in one line of JSON, when it can.

    InvariantError if the engine itself fails. It is of no use then, and neither is this process.
    """
    torch.set_num_threads(1)
    engine = Engine(options)
    server, stop, loop = Server(engine), asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # handler_cancellation: a client that hangs up must free its place.
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    host = f"[{options.host}]" if ":" in options.host else options.host
    ready = {
        "event": "ready",
        "url": f"http://{host}:{runner.addresses[0][1]}",
        "model": options.served_model_name,
        "weight_version": engine.weight_version,
        "max_model_len": engine.max_len,
        "kv_cache_size_tokens": engine.num_blocks * engine.block_size,
        "block_size": engine.block_size,
        "max_num_seqs": options.max_num_seqs,
    }
    print(json.dumps(ready), flush=True)
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), server.thread.failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    if server.thread.failed.done():
        raise InvariantError("the engine failed in a step") from server.thread.failed.exception()
    server.thread.stop()
