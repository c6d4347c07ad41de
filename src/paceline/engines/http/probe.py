"""What a server can do, found out before anything depends on it: routes, ids, logprobs, lengths, names."""

from __future__ import annotations

import asyncio
import os

import msgspec
import numpy as np

from paceline.domain.ids import Version
from paceline.engines.http.dialect import Dialect, VllmDialect
from paceline.engines.http.link import Answer, Link, LinkLost
from paceline.engines.http.metrics import read_kv_tokens
from paceline.engines.http.weights import read_version
from paceline.engines.http.wire import COMPLETIONS, GENERATE, error_text
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest, SamplingParams

_EVERY_S = 0.5


class Problem(msgspec.Struct, frozen=True, gc=False):
    """Something about a server that no run can work with."""

    text: str
    remedy: str = ""
    """What to do, where `text` does not say it."""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


class Remedies(msgspec.Struct, frozen=True, gc=False):
    """What to do about a server that lacks something."""

    processed: str = "start it with --logprobs-mode processed_logprobs"
    pause: str = "start it with VLLM_SERVER_DEV_MODE=1 (vLLM 0.16 or later)"
    metrics: str = "start it without --disable-log-stats"


class ServerFacts(msgspec.Struct, frozen=True, gc=False):
    """What the probe saw."""

    route: str = COMPLETIONS
    """The generate route in use."""
    models: tuple[str, ...] = ()
    """Names it serves."""
    max_model_len: int | None = None
    kv_tokens: int | None = None
    version: Version | None = None
    """The weight version it says it holds; None when it does not say."""
    processed_logprobs: bool | None = None
    """Whether logprobs are of the distribution sampled from, after temperature; None when it was not told apart."""
    has_metrics: bool = False
    can_pause: bool = False
    """Whether it can be paused, and so take new weights."""
    can_stream: bool = True
    """Whether a reply can be heard while it is sampled, at a cost that grows with its length."""
    problems: tuple[Problem, ...] = ()
    remedies: Remedies = Remedies()


class Model(msgspec.Struct, frozen=True, gc=False):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True, gc=False):
    data: list[Model]


async def probe(link: Link, served_name: str, *, start_s: float) -> ServerFacts:
    """Wait up to `start_s` for the server, then look at it. EngineError when it does not come up."""
    models = await models_when_up(link, start_s)
    names = tuple(model.id for model in models)
    problems: list[Problem] = []
    ours = next((model for model in models if model.id == served_name), None)
    if ours is None:
        known = ", ".join(names) or "none"
        problems.append(
            Problem(
                f"{link.name}: serves no model {served_name!r} (it serves: {known})",
                f"set model.served_name to one of them, or start the server with --served-model-name {served_name}",
            )
        )
    name = served_name if ours or not names else names[0]
    version: Version | None = None
    try:
        version = await read_version(link)
    except EngineError as error:
        problems.append(Problem(str(error), "restart the server with the run's initial weights"))
    page = await metrics_page(link)
    route, processed, can_pause = COMPLETIONS, None, False
    try:
        can_pause = await _is_working(link)
        route = await _route(link, name)
        processed = await is_processed(link, VllmDialect(link, name, route))
    except EngineError as error:
        text = str(error)
        problems.append(Problem(text if link.name in text else f"{link.name}: {text}"))
    return ServerFacts(
        route=route,
        models=names,
        max_model_len=ours.max_model_len if ours else models[0].max_model_len if models else None,
        kv_tokens=read_kv_tokens(page) if page else None,
        version=version,
        processed_logprobs=processed,
        has_metrics=page is not None,
        can_pause=can_pause,
        problems=tuple(problems),
    )


async def models_when_up(link: Link, start_s: float) -> list[Model]:
    """The models, once the server lists them: that is when it is ready to sample."""
    loop = asyncio.get_running_loop()
    deadline, cause = loop.time() + start_s, "no answer"
    while True:
        try:
            async with asyncio.timeout(min(link.limits.admin_s, max(0.1, deadline - loop.time()))):
                answer = await link.send("GET", "/v1/models")
        except LinkLost as lost:
            cause = str(lost)
        except TimeoutError:
            cause = "no answer"
        else:
            if answer.status == 200:
                try:
                    return msgspec.json.decode(answer.body, type=_Models).data
                except msgspec.DecodeError as error:
                    raise EngineError(
                        f"{link.name}: /v1/models answered what is no list of models: {error}"
                    ) from None
            cause = f"/v1/models answered {answer.status}: {error_text(answer.body)}"
            if answer.status in (401, 403):
                raise EngineError(
                    f"{link.name}: {cause}: set engine.api_key_env to the variable that holds its key"
                )
            if answer.status < 500 and answer.status != 429:
                raise EngineError(f"{link.name}: {cause}")
        # A server that starts tells nobody when it is done; this is the one place that asks again and again.
        if loop.time() + _EVERY_S >= deadline:
            raise EngineError(f"{link.name}: not up after {start_s:g} s (start_s): {cause}")
        await asyncio.sleep(_EVERY_S)


async def _is_working(link: Link) -> bool:
    """Whether the server can be paused. EngineError when it is: a request would wait for ever."""
    answer = await link.call("GET", "/is_paused")
    if answer.status == 200 and answer.body.replace(b" ", b"") == b'{"is_paused":true}':
        raise EngineError(
            f"{link.name}: is paused: another run is updating it, or left it so; in the second case POST /resume to it"
        )
    return answer.status == 200


async def metrics_page(link: Link) -> bytes | None:
    try:
        async with asyncio.timeout(link.limits.metrics_s):
            answer = await link.send("GET", "/metrics")
    except (LinkLost, TimeoutError):
        return None
    return answer.body if answer.status == 200 else None


async def _route(link: Link, name: str) -> str:
    """The newest route the server has; EngineError when none returns exact ids and logprobs."""
    one = SamplingParams(max_tokens=1)
    generate, completions = (VllmDialect(link, name, route) for route in (GENERATE, COMPLETIONS))
    answer = await sample(link, generate, one, "route")
    if not answer.is_missing:
        exact(link, generate, answer)
        return GENERATE
    exact(link, completions, await sample(link, completions, one, "route"))
    return COMPLETIONS


async def is_processed(link: Link, dialect: Dialect) -> bool | None:
    """Whether logprobs follow the temperature: the one most likely token, drawn at two of them.

    In the distribution sampled from, its probability is one (or, where only the temperature is applied, moves);
    raw, it is the same at both and below one. None when two draws of one token are two tokens.
    """
    replies: list[GenerateReply] = []
    for temperature in (0.5, 2.0):
        params = SamplingParams(max_tokens=1, temperature=temperature, top_k=1)
        replies.append(exact(link, dialect, await sample(link, dialect, params, f"t{temperature}")))
    cold, hot = replies
    if not len(cold.token_ids) or not np.array_equal(cold.token_ids, hot.token_ids):
        return None
    a, b = float(cold.logprobs[0]), float(hot.logprobs[0])
    if abs(a - b) > 1e-4:
        return True
    return b > -1e-4


async def sample(link: Link, dialect: Dialect, params: SamplingParams, tag: str) -> Answer:
    """One request after the token 1. EngineError when no whole answer comes."""
    request = GenerateRequest(
        request_id=f"probe-{tag}-{os.urandom(4).hex()}", token_ids=np.array([1], np.int32), sampling=params
    )
    try:
        async with asyncio.timeout(link.limits.admin_s):
            return await link.send("POST", dialect.route, dialect.encode(request, request.request_id))
    except TimeoutError:
        raise EngineError(
            f"{link.name}: {dialect.route} gave no answer within {link.limits.admin_s:g} s"
        ) from None
    except LinkLost as lost:
        raise EngineError(f"{link.name}: {dialect.route}: {lost}") from lost


def exact(link: Link, dialect: Dialect, answer: Answer) -> GenerateReply:
    """The reply, if it can be trained on. EngineError otherwise."""
    if answer.status != 200:
        raise EngineError(f"{link.name}: {dialect.route} answered {answer.status}: {error_text(answer.body)}")
    return dialect.decode(answer.body, 0)
