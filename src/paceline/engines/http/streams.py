"""A reply that comes in parts, while it is sampled: told on at once, and put together to be checked as a whole one.

Asked for only where somebody listens (`GenerateRequest.tell`): a part costs as much as a short reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.domain.ids import Version
from paceline.engines.http.link import LinkLost
from paceline.engines.http.wire import (
    NO_IDS,
    Choice,
    Content,
    Reply,
    Span,
    Usage,
    error_text,
    event_of,
    exact,
    logprobs_of,
)
from paceline.errors import EngineError
from paceline.ports import GenerateReply


class _Piece(Choice, frozen=True, gc=False):
    text: str | None = None


class _Part(msgspec.Struct, frozen=True, gc=False):
    choices: list[_Piece] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Part)


class Heard:
    """What a stream has said so far."""

    def __init__(self, tell: Callable[[Sequence[int]], None], *, spans: bool) -> None:
        """`spans`: as `wire.decode` has it."""
        self._tell = tell
        self._spans = spans
        self._ids: list[int] | None = None
        """None until a part has had a list of them: a stream that never has is no empty answer."""
        self._logprobs: list[float | None] = []
        self._runs: list[Span] | None = None
        self._finish: str | None = None
        self._stop_reason: str | int | None = None
        self._usage: Usage | None = None
        self.is_begun = False
        """Whether the answer is a stream at all."""

    @property
    def tokens(self) -> int:
        return len(self._ids or ())

    def take(self, data: bytes) -> None:
        """One event. LinkLost when the server says that it breaks off; EngineError for what cannot be read."""
        self.is_begun = True
        if data == b"[DONE]":
            return
        part = event_of(_decoder, data)
        if part.error is not None:
            raise LinkLost(f"it broke the stream off: {error_text(data)}", arrived=True)
        self._usage = part.usage or self._usage
        if part.choices:
            self._choice(part.choices[0])

    def _choice(self, choice: _Piece) -> None:
        ids, values = choice.token_ids, logprobs_of(choice)
        self._finish = choice.finish_reason or self._finish
        self._runs = choice.weight_versions or self._runs
        if choice.stop_reason is not None:
            self._stop_reason = choice.stop_reason
        if ids is None:
            if choice.text or values:
                raise EngineError(NO_IDS)
            return
        if len(values or ()) != len(ids):
            raise EngineError(
                f"the engine's stream gave {len(ids)} token ids and {len(values or ())} logprobs after {self.tokens} tokens"
            )
        if self._ids is None:
            self._ids = []
        self._ids += ids
        self._logprobs += values or ()
        if ids:
            self._tell(ids)

    def whole(self, known: Version) -> GenerateReply:
        """The reply. LinkLost when the stream ended before it was whole; EngineError as `wire.decode`."""
        if self._finish is None:
            raise LinkLost("the stream ended without a finish_reason", arrived=True)
        return self._reply(self._finish, known, self._runs)

    def kept(self, known: Version) -> GenerateReply:
        """What there is, as of a request that was aborted: who sampled it was not said yet."""
        return self._reply("abort", known, None)

    def _reply(self, finish: str, known: Version, runs: list[Span] | None) -> GenerateReply:
        choice = Choice(self._ids, Content(token_logprobs=self._logprobs), finish, self._stop_reason, runs)
        return exact(Reply([choice], self._usage), known, spans=self._spans)
