"""What SGLang's /generate answers, whole or as a stream, read and checked; whatever passes is exact and may train.

A stream is asked for only of a server with --incremental-streaming-output, whose events carry what is new. Without it each
event repeats the answer from its first token on: a long one would cost the square of its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.domain.ids import Version
from paceline.domain.rollout import Finish
from paceline.engines.http.link import LinkLost
from paceline.engines.http.retry import is_transient
from paceline.engines.http.wire import (
    Span,
    checked,
    error_text,
    event_of,
    excerpt,
    finish_of,
    lenient,
    version_of,
    version_runs,
)
from paceline.errors import EngineError
from paceline.ports import GenerateReply

_NO_IDS = "the engine did not return token ids: it must be SGLang's own /generate"


class _Finish(msgspec.Struct, frozen=True, gc=False):
    type: str
    matched: str | int | None = None
    message: str | None = None
    status_code: int | None = None


_Entry = tuple[float | None, int, Any]
"""Of one sampled token: its logprob, its id, and its text, which nobody asks for."""


class _Meta(msgspec.Struct, frozen=True, gc=False):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Entry] | None = None
    completion_tokens: int = 0
    """Of the answer so far, also where a stream's event has only what is new."""
    cached_tokens: int | None = 0
    weight_version: str | None = None
    weight_versions: list[Span] | None = None


class _Reply(msgspec.Struct, frozen=True, gc=False):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Event(msgspec.Struct, frozen=True, gc=False):
    meta_info: _Meta | None = None
    output_ids: list[int] | None = None
    error: Any = None


_decoder, _events = msgspec.json.Decoder(_Reply), msgspec.json.Decoder(_Event)


def decode(body: bytes, known: Version) -> GenerateReply:
    """A whole reply. `known` stamps tokens whose sampler it does not name. EngineError when it is not exact."""
    try:
        reply = _decoder.decode(body)
    except msgspec.DecodeError as error:  # also what NaN and Infinity raise: they are not JSON
        reply = lenient(body, error, _Reply)
    meta, entries = reply.meta_info, reply.meta_info.output_token_logprobs
    finish = _finish_of(meta.finish_reason)
    if entries is None:
        if reply.output_ids:
            raise EngineError(_no_logprobs(len(reply.output_ids)))
        if reply.output_ids is None and finish != "abort":
            raise EngineError(_NO_IDS)
        entries = []
    ids = [token for _, token, _ in entries]
    if reply.output_ids and reply.output_ids != ids:
        raise EngineError(
            f"the engine's {len(reply.output_ids)} output_ids are not the {len(ids)} ids of its logprobs"
        )
    return _exact(entries, finish, meta, known)


class Heard:
    """What a stream has said so far."""

    def __init__(self, tell: Callable[[Sequence[int]], None]) -> None:
        self._tell = tell
        self._entries: list[_Entry] = []
        self._last = _Meta()
        self.is_begun = False
        """Whether the answer is a stream at all."""

    @property
    def tokens(self) -> int:
        return len(self._entries)

    def take(self, data: bytes) -> None:
        """One event. LinkLost when the server says that it breaks off; EngineError for what cannot be read."""
        self.is_begun = True
        if data == b"[DONE]":
            return
        event = event_of(_events, data)
        if event.error is not None:
            raise _broke_off(_code_of(event.error), error_text(data))
        if event.meta_info is None:
            raise EngineError(f"{_NO_IDS} (it says {excerpt(data)!r})")
        self._last = event.meta_info
        new = self._new(event.meta_info, event.output_ids)
        self._entries += new
        if new:
            self._tell([token for _, token, _ in new])
        if (finish := self._last.finish_reason) is not None and _is_refusal(finish):
            raise _broke_off(finish.status_code or 500, str(finish.message))

    def _new(self, meta: _Meta, ids: list[int] | None) -> list[_Entry]:
        """Tokens that were not told before."""
        entries, total = meta.output_token_logprobs, meta.completion_tokens
        if entries is None:
            if ids:
                raise EngineError(_no_logprobs(len(ids)))
            entries = []
        if len(entries) == total:
            # The whole answer: the first event, or that of a request which was aborted while it waited.
            new = entries[self.tokens :]
        elif self.tokens + len(entries) == total:
            new = entries
        else:
            raise EngineError(
                f"the engine's stream gave {len(entries)} logprobs after {self.tokens} tokens, and says that there "
                f"are {total}"
            )
        if new and ids and ids[-len(new) :] != [token for _, token, _ in new]:
            raise EngineError(
                f"the engine's output_ids after {self.tokens} tokens are not those of its logprobs"
            )
        return new

    def whole(self, known: Version) -> GenerateReply:
        """The reply. LinkLost when the stream ended before it was whole; EngineError as `decode`."""
        if self._last.finish_reason is None:
            raise LinkLost("the stream ended without a finish_reason", arrived=True)
        return _exact(self._entries, _finish_of(self._last.finish_reason), self._last, known)

    def kept(self, known: Version) -> GenerateReply:
        """What there is, as of a request that was aborted: who sampled it was not said yet."""
        return _exact(self._entries, "abort", _Meta(), known)


def _exact(entries: Sequence[_Entry], finish: Finish, meta: _Meta, known: Version) -> GenerateReply:
    ids, logprobs = checked([token for _, token, _ in entries], [logprob for logprob, _, _ in entries])
    if not meta.weight_versions and meta.weight_version is not None:
        # The one label it gives is that at the end; what it held at the start may be older.
        known = min(known, version_of(meta.weight_version))
    return GenerateReply(
        token_ids=ids,
        logprobs=logprobs,
        finish=finish,
        versions=version_runs(meta.weight_versions, len(ids), known),
        cached_tokens=meta.cached_tokens or 0,
        stop_reason=meta.finish_reason.matched if meta.finish_reason else None,
    )


def _finish_of(reason: _Finish | None) -> Finish:
    finish = finish_of(reason.type if reason else None)
    if reason is not None and _is_refusal(reason):
        raise _gave_up(reason.status_code, reason.message)
    return finish


def _is_refusal(reason: _Finish) -> bool:
    return reason.type == "abort" and (reason.status_code or 200) >= 400


def _broke_off(status: int, why: str) -> Exception:
    """What a stream says for an HTTP status, once it has begun: LinkLost where trying again may help."""
    if is_transient(status, b""):
        return LinkLost(f"it broke the stream off ({status}): {why}", arrived=True)
    return _gave_up(status, why)


def _gave_up(status: int | None, why: str | None) -> EngineError:
    return EngineError(f"the engine gave the request up ({status}): {why}")


def _code_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _no_logprobs(tokens: int) -> str:
    return (
        f"the engine returned {tokens} token ids and no logprobs: it must honour `return_logprob` (does a gateway in "
        "front of it drop that?)"
    )
