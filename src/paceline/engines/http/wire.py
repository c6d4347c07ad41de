"""What goes over the wire to a server of vLLM's routes, and what comes back, as typed records.

Ids and logprobs go straight from JSON to arrays. A reply is checked here and nowhere else: whatever passes
is exact and may train; whatever does not raises EngineError with the place and the value, never a guess.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from paceline.domain.ids import Version
from paceline.domain.rollout import Finish, VersionRuns
from paceline.errors import EngineError, ImpossibleLogprobs
from paceline.ports import GenerateReply, GenerateRequest

_T = TypeVar("_T")

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

_LOWEST = -9990.0
"""vLLM writes -inf as -9999.0; a real logprob of a sampled token never comes near."""
_HIGHEST = 1e-3
"""Rounding in bfloat16 lets a logprob of zero come out a little above it."""
_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
NO_IDS = (
    "the engine did not return token ids: it must honour `return_token_ids` (vLLM 0.10.2 or later), or "
    f"serve {GENERATE} (start it with --enable-scale-out)"
)
_LABEL = re.compile(r"v(\d+)")


class _Sampling(msgspec.Struct, frozen=True, gc=False):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] | UnsetType
    stop_token_ids: tuple[int, ...] | UnsetType
    seed: int | UnsetType
    logprobs: int = 0
    # Else the server looks for stop strings in a text without special tokens: one that is such a token, or has one in it,
    # would never be found, and two tokens with one between them would be taken for neighbours.
    skip_special_tokens: bool = False


class _Streaming(msgspec.Struct, frozen=True, gc=False):
    include_usage: bool = True


class _Generate(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    token_ids: list[int]
    sampling_params: _Sampling
    model: str
    cache_salt: str | UnsetType
    stream: bool | UnsetType
    stream_options: _Streaming | UnsetType


class _Complete(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    prompt: list[int]
    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] | UnsetType
    stop_token_ids: tuple[int, ...] | UnsetType
    seed: int | UnsetType
    cache_salt: str | UnsetType
    stream: bool | UnsetType
    stream_options: _Streaming | UnsetType
    logprobs: int = 0
    return_token_ids: bool = True
    # What this route would else take from the model's generation_config.json, behind our back.
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    skip_special_tokens: bool = False


class Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float | None = None


class Content(msgspec.Struct, frozen=True, gc=False):
    content: list[Logprob] | None = None
    token_logprobs: list[float | None] | None = None


class Span(msgspec.Struct, frozen=True, gc=False):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, gc=False):
    token_ids: list[int] | None = None
    logprobs: Content | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[Span] | None = None


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens_details: _Details | None = None


class Reply(msgspec.Struct, frozen=True, gc=False):
    choices: list[Choice]
    usage: Usage | None = None


_STREAMING = _Streaming()
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Reply)


def encode(request: GenerateRequest, request_id: str, route: str, model: str) -> bytes:
    """The body of one attempt at `request`; its answer is a stream if what is sampled is to be told."""
    s = request.sampling
    stream, options = (UNSET, UNSET) if request.tell is None else (True, _STREAMING)
    ids: list[int] = request.token_ids.tolist()
    stop, stop_ids = s.stop or UNSET, s.stop_token_ids or UNSET
    seed = UNSET if s.seed is None else s.seed
    salt = request.cache_salt or UNSET
    if route == GENERATE:
        sampling = _Sampling(s.max_tokens, s.temperature, s.top_p, s.top_k, stop, stop_ids, seed)
        return _encoder.encode(_Generate(request_id, ids, sampling, model, salt, stream, options))
    return _encoder.encode(
        _Complete(
            request_id,
            ids,
            model,
            s.max_tokens,
            s.temperature,
            s.top_p,
            s.top_k,
            stop,
            stop_ids,
            seed,
            salt,
            stream,
            options,
        )
    )


def decode(body: bytes, known: Version, *, spans: bool = True) -> GenerateReply:
    """The reply, checked. `known` stamps the tokens of a server that does not say who sampled them, or, without `spans`,
    speaks of the base model's weights where an adapter sampled.

    EngineError when it is not exact: no ids, lengths that differ, a logprob that cannot be one.
    """
    try:
        reply = _decoder.decode(body)
    except msgspec.DecodeError as error:  # also what NaN and Infinity raise: they are not JSON
        reply = lenient(body, error, Reply)
    return exact(reply, known, spans=spans)


def exact(reply: Reply, known: Version, *, spans: bool = True) -> GenerateReply:
    """The checks of `decode`."""
    if not reply.choices:
        raise EngineError("the engine's reply has no choices")
    choice = reply.choices[0]
    ids, logprobs = _sampled(choice)
    finish = finish_of(choice.finish_reason)
    details = reply.usage.prompt_tokens_details if reply.usage else None
    return GenerateReply(
        token_ids=ids,
        logprobs=logprobs,
        finish=finish,
        versions=version_runs(choice.weight_versions if spans else None, len(ids), known),
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        stop_reason=choice.stop_reason,
    )


def finish_of(reason: str | None) -> Finish:
    """Why the server says that it stopped. EngineError for a reason that is none of ours."""
    finish = _FINISHES.get(reason)
    if finish is None:
        raise EngineError(
            f"the engine's reply ended with finish_reason {reason!r}, not stop, length or abort"
        )
    return finish


def version_of(label: str) -> Version:
    """The version a server's label names: `v7` is 7, `default` (never updated) is 0. EngineError for others."""
    if match := _LABEL.fullmatch(label):
        return int(match[1])
    if label == "default":
        return 0
    raise EngineError(
        f"the engine says its weights are {label!r}, a label this run never gave: does another run update it?"
    )


def label_of(version: Version) -> str:
    return f"v{version}"


def _sampled(choice: Choice) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    ids = choice.token_ids
    if ids is None:
        raise EngineError(NO_IDS)
    values = logprobs_of(choice)
    if values is None:
        if ids:
            raise EngineError(
                f"the engine returned {len(ids)} token ids and no logprobs: it must honour `logprobs: 0` "
                "(start it with --max-logprobs 1 or more, and --logprobs-mode processed_logprobs)"
            )
        values = ()
    return checked(ids, values)


def logprobs_of(choice: Choice) -> Sequence[float | None] | None:
    """Those of its tokens, whichever of the two forms they come in; None if it has none."""
    given = choice.logprobs
    if given is None:
        return None
    return given.token_logprobs if given.content is None else [entry.logprob for entry in given.content]


def checked(
    ids: Sequence[int], values: Sequence[float | None]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Sampled ids and their logprobs as read-only arrays. EngineError, with the place, for what cannot be trained on."""
    if len(ids) != len(values):
        raise EngineError(f"the engine returned {len(ids)} token ids and {len(values)} logprobs")
    try:
        id_array = np.array(ids, dtype=np.int32)
    except OverflowError:
        raise EngineError(
            f"the engine returned token id {max(ids, key=abs)}, which no vocabulary holds"
        ) from None
    logprobs = np.array(values, dtype=np.float32)  # None becomes nan
    if len(ids):
        if id_array.min() < 0:
            raise EngineError(
                f"the engine returned token id {id_array.min()} at position {id_array.argmin()}"
            )
        # Written so that a nan fails it.
        if not (logprobs.min() > _LOWEST and logprobs.max() <= _HIGHEST):
            raise _impossible(values)
    id_array.flags.writeable = logprobs.flags.writeable = False
    return id_array, logprobs


def _impossible(values: Sequence[float | None]) -> ImpossibleLogprobs:
    """Which logprob cannot be one, and why."""
    bad = [i for i, v in enumerate(values) if v is None or not _LOWEST < v <= _HIGHEST]
    value = values[bad[0]]
    if value is None or not math.isfinite(value):
        why = "it is not finite"
    elif value > 0:
        why = "it is above zero"
    else:
        why = "the server writes -9999 where it means -inf"
    return ImpossibleLogprobs(
        f"the engine returned logprob {'null' if value is None else value} at position {bad[0]} of {len(values)}: "
        f"{why} ({len(bad)} such in this reply)",
        bad=len(bad),
        tokens=len(values),
    )


def version_runs(spans: Sequence[Span] | None, tokens: int, known: Version) -> VersionRuns:
    """What a server's spans say of who sampled what; `known` for all where it gives none."""
    if not tokens:
        return ()
    if not spans:
        return ((known, tokens),)
    at, runs = 0, []
    for span in spans:
        if span.start != at or span.end < at:
            raise EngineError(
                f"the engine's weight_versions do not follow each other: span {span.version!r} "
                f"{span.start}-{span.end} after {at} tokens"
            )
        if span.end > at:
            runs.append((version_of(span.version), span.end - at))
        at = span.end
    if at != tokens:
        raise EngineError(f"the engine's weight_versions cover {at} of {tokens} tokens")
    return tuple(runs)


def lenient(body: bytes, error: msgspec.DecodeError, kind: type[_T]) -> _T:
    """The reply once more, by a parser that knows NaN and Infinity, so that the error can name the place."""
    try:
        return msgspec.convert(json.loads(body), kind)
    except (ValueError, RecursionError, msgspec.ValidationError):
        raise EngineError(
            f"the engine's reply cannot be read: {error} (it begins {excerpt(body)!r})"
        ) from None


def event_of(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    """One event of a stream. EngineError for what cannot be read."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(
            f"the engine's stream cannot be read: {error} (it says {excerpt(data)!r})"
        ) from None


def excerpt(body: bytes, limit: int = 200) -> str:
    """The start of a body, on one line, for error messages."""
    text = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_text(body: bytes) -> str:
    """What a server says went wrong, whichever of the usual shapes it says it in."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return excerpt(body)
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return excerpt(said.encode() if isinstance(said, str) else body)
