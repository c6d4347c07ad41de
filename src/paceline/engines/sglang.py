"""The Engine port over SGLang's native HTTP API, by the client that speaks to vLLM too.

    generate   POST /generate            ids in (`input_ids`), ids and logprobs out (`meta_info.output_token_logprobs`), as a
                                         stream where somebody listens and /server_info says `incremental_streaming_output`
    abort      POST /abort_request       by `rid`; the request returns with what it had sampled
    weights    POST /pause_generation (retract) ─▶ /update_weights_from_disk ─▶ GET /get_weight_version ─▶ /continue_generation
    load       GET  /metrics             `sglang:…`, where the server was started with --enable-metrics

Written from SGLang's documentation and source (0.5 series) and tested against a scripted server of these routes; NOT tried on a
real SGLang. `retract` puts running requests back into the queue, so that their KV is computed anew by the new weights.

Seeds are not sent: SGLang takes one only in its deterministic mode, and older versions refuse the name. Rollouts are
as random, and are not repeated by giving a run the same seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from paceline.domain.ids import EngineId, Version
from paceline.domain.load import EngineLoad
from paceline.engines import sglang_replies as replies
from paceline.engines.http.adapters import is_adapter
from paceline.engines.http.client import HttpEngine
from paceline.engines.http.link import Answer, Limits, Link
from paceline.engines.http.probe import (
    Problem,
    Remedies,
    ServerFacts,
    exact,
    is_processed,
    metrics_page,
    models_when_up,
    sample,
)
from paceline.engines.http.retry import Retry
from paceline.engines.http.weights import expect_version, resumed_after, stopped_unless_loaded
from paceline.engines.http.wire import error_text, excerpt, label_of, version_of
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest, PauseMarks, SamplingParams, WeightCheck

ROUTE = "/generate"
_REMEDIES = Remedies(
    processed="start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
    pause="use a version that has /pause_generation (0.5 series)",
    metrics="start it with --enable-metrics",
)
_METRIC = re.compile(
    rb"^sglang:(num_running_reqs|num_queue_reqs|token_usage|num_retracted_requests_total|num_retracted_reqs"
    rb"|prompt_tokens_total|cached_tokens_total|generation_tokens_total|max_total_num_tokens)"
    rb"(?:\{.*\})? +([-+.\w]+)",
    re.MULTILINE,
)


# ---- what goes over the wire


class _Sampling(msgspec.Struct, frozen=True, gc=False):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] | UnsetType
    stop_token_ids: tuple[int, ...] | UnsetType
    skip_special_tokens: bool = False
    # What the server's own defaults could else change behind our back.
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _Generate(msgspec.Struct, frozen=True, gc=False):
    rid: str
    input_ids: list[int]
    sampling_params: _Sampling
    extra_key: str | UnsetType
    """Separates prefix-cache entries, as vLLM's cache_salt does."""
    return_logprob: bool = True
    logprob_start_len: int = -1
    """Of the prompt none."""
    stream: bool = False


_encoder = msgspec.json.Encoder()


class SglangDialect:
    """How SGLang says things."""

    route = ROUTE
    no_abort = "SGLang 0.4 or later"

    def __init__(self, link: Link, marks: PauseMarks | None = None, *, streams: bool = False) -> None:
        """`streams`: the events of its streams carry what is new, so that it can be asked for one."""
        self._link, self._marks, self._streams = link, marks, streams

    def encode(self, request: GenerateRequest, wire_id: str) -> bytes:
        s = request.sampling
        sampling = _Sampling(
            s.max_tokens, s.temperature, s.top_p, s.top_k, s.stop or UNSET, s.stop_token_ids or UNSET
        )
        return _encoder.encode(
            _Generate(
                wire_id,
                request.token_ids.tolist(),
                sampling,
                request.cache_salt or UNSET,
                stream=self._streams and request.tell is not None,
            )
        )

    def decode(self, body: bytes, known: Version) -> GenerateReply:
        return replies.decode(body, known)

    def listen(self, tell: Callable[[Sequence[int]], None]) -> replies.Heard | None:
        return replies.Heard(tell) if self._streams else None

    def abort_call(self, wire_id: str) -> tuple[str, bytes]:
        return "/abort_request", _encoder.encode({"rid": wire_id, "abort_all": False})

    def read_load(self, page: bytes) -> EngineLoad:
        found = _metrics(page)

        def total(name: str) -> int:
            return int(sum(found.get(name, ())))

        if "num_running_reqs" not in found or "token_usage" not in found:
            missing = "num_running_reqs" if "token_usage" in found else "token_usage"
            raise EngineError(f"its /metrics page has no sglang:{missing}: start it with --enable-metrics")
        # The counter, where there is one: the gauge of nearly the same name counts the last batch only.
        retracted = "num_retracted_requests_total"
        return EngineLoad(
            running=total("num_running_reqs"),
            waiting=total("num_queue_reqs"),
            kv_usage=min(1.0, max(0.0, max(found["token_usage"]))),
            preemptions=total(retracted if retracted in found else "num_retracted_reqs"),
            prefix_queries=total("prompt_tokens_total"),
            prefix_hits=total("cached_tokens_total"),
            generated_tokens=total("generation_tokens_total"),
        )

    def stamp(self, held: Version) -> Version:
        return held

    def take_back(self) -> None:
        """There is nothing to go back to: the weights were replaced."""

    async def load_weights(self, version: Version, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        link = self._link
        if is_adapter(path):
            raise EngineError(f"{link.name}: {path} holds a LoRA adapter; those are loaded into vLLM only")
        async with resumed_after(self._resume, self._marks, link.url, version):
            # Of requests in flight, those of a version without modes return as aborted and are continued.
            await link.demand("POST", "/pause_generation", {"mode": "retract"}, waits_again=False)
            async with stopped_unless_loaded(stop):
                answer = await link.call(
                    "POST",
                    "/update_weights_from_disk",
                    {"model_path": path, "weight_version": label_of(version), "flush_cache": True},
                    within_s=link.limits.load_weights_s,
                )
                _succeeded(link, path, answer)
                expect_version(link, await read_version(link), version, path)

    async def _resume(self, went_well: bool) -> None:
        await self._link.demand("POST", "/continue_generation", {}, waits_again=went_well)


class _Said(msgspec.Struct, frozen=True, gc=False):
    success: bool = True
    message: str = ""


def _succeeded(link: Link, path: str, answer: Answer) -> None:
    """SGLang says whether a load worked in the body; the status alone is not enough."""
    what = f"{link.name}: /update_weights_from_disk from {path}"
    if answer.status != 200:
        raise EngineError(f"{what} answered {answer.status}: {error_text(answer.body)}")
    try:
        said = msgspec.json.decode(answer.body, type=_Said)
    except msgspec.DecodeError:
        raise EngineError(f"{what} answered {excerpt(answer.body)!r}") from None
    if not said.success:
        raise EngineError(f"{what} did not succeed: {said.message or 'without a word'}")


def _metrics(page: bytes) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, text in _METRIC.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(name.decode(), []).append(value)
    return found


# ---- looking at a server


class _Info(msgspec.Struct, frozen=True, gc=False):
    weight_version: str | None = None
    incremental_streaming_output: bool | None = False
    max_total_num_tokens: int | None = None
    context_length: int | None = None


async def read_version(link: Link) -> Version | None:
    """The version the server says it holds; None when it does not say. EngineError for a foreign label."""
    for route in ("/get_weight_version", "/model_info", "/get_model_info"):
        info = await _info(link, route)
        if info is not None and info.weight_version is not None:
            try:
                return version_of(info.weight_version)
            except EngineError as error:
                raise EngineError(f"{link.name}: {route}: {error}") from None
    return None


async def _info(link: Link, route: str) -> _Info | None:
    answer = await link.call("GET", route)
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=_Info)
    except msgspec.DecodeError:
        return None


async def probe(link: Link, served_name: str, *, start_s: float) -> ServerFacts:
    """Wait up to `start_s` for the server, then look at it. EngineError when it does not come up."""
    models = await models_when_up(link, start_s)
    names = tuple(model.id for model in models)
    problems: list[Problem] = []
    if served_name not in names:
        problems.append(
            Problem(
                f"{link.name}: serves no model {served_name!r} (it serves: {', '.join(names) or 'none'})",
                f"set model.served_name to one of them, or start the server with --served-model-name {served_name}",
            )
        )
    version: Version | None = None
    try:
        version = await read_version(link)
    except EngineError as error:
        problems.append(Problem(str(error), "restart the server with the run's initial weights"))
    page = await metrics_page(link)
    info = await _info(link, "/server_info") or await _info(link, "/get_server_info") or _Info()
    capacity = _metrics(page).get("max_total_num_tokens") if page else None
    dialect, processed = SglangDialect(link), None
    # A GET of a route that is there is the wrong method for it, and does nothing.
    can_pause = (await link.call("GET", "/pause_generation")).status not in (403, 404, 501)
    try:
        exact(link, dialect, await sample(link, dialect, SamplingParams(max_tokens=1), "route"))
        processed = await is_processed(link, dialect)
    except EngineError as error:
        text = str(error)
        problems.append(Problem(text if link.name in text else f"{link.name}: {text}"))
    lengths = [model.max_model_len for model in models if model.id == served_name] or [None]
    return ServerFacts(
        route=ROUTE,
        models=names,
        max_model_len=lengths[0] or info.context_length,
        kv_tokens=int(sum(capacity)) if capacity else info.max_total_num_tokens,
        version=version,
        processed_logprobs=processed,
        has_metrics=page is not None,
        can_pause=can_pause,
        can_stream=bool(info.incremental_streaming_output),
        problems=tuple(problems),
        remedies=_REMEDIES,
    )


async def connect(
    url: str,
    *,
    id: EngineId,
    served_name: str,
    max_connections: int = 4096,
    limits: Limits | None = None,
    retry: Retry | None = None,
    api_key: str | None = None,
    start_s: float = 600.0,
    interrupt: bool = False,
    check: WeightCheck | None = None,
    marks: PauseMarks | None = None,
) -> HttpEngine:
    """Wait until the server at `url` answers, look at what it can do, and return the engine.

    EngineError when it does not answer within `start_s`, serves no model `served_name`, or does not return token ids.
    """
    link = Link(url, f"engine {id} ({url})", limits or Limits(), retry or Retry(), api_key)
    try:
        facts = await probe(link, served_name, start_s=start_s)
        if facts.problems:
            raise EngineError("; ".join(map(str, facts.problems)))
    except BaseException:
        await link.close()
        raise
    return HttpEngine(
        link,
        id,
        facts,
        SglangDialect(link, marks, streams=facts.can_stream),
        max_connections=max_connections,
        interrupt=interrupt,
        check=check,
    )
