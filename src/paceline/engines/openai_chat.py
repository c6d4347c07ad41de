"""Any OpenAI-compatible chat endpoint: text in, text out. For judges, teachers, frozen policies, simulated users, and evals
(`paceline eval`).

Not for training: text has no token ids, and what was sampled cannot be told from it exactly. A run whose `[engine]` is
of this type is refused.

    [chat.judge]
    url = "https://api.example.com/v1"
    model = "some-model"
    api_key_env = "JUDGE_API_KEY"

An algorithm asks for it by its name, as for any other service, with a string, a list of messages, or a dictionary of
the endpoint's own options that holds `messages`; it gets a `ChatReply`.

A call is tried again where the endpoint surely did no work on it: it could not be reached, or it said that it is busy
(429, 503). A call whose answer was lost is not: the endpoint may have worked, and charged, for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.engines.http.link import Limits, Link
from paceline.engines.http.retry import Retry
from paceline.engines.http.wire import error_text, excerpt
from paceline.errors import EngineError, without_password
from paceline.ports import ChatReply

ROUTE = "/chat/completions"
_MOST_TOKENS = 10**8
"""Of one reply: a count above is none."""


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None


class OpenAIChat:
    """One endpoint and one model of it. Call it, or `chat`, from one event loop; close it there."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        name: str = "",
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        max_connections: int = 64,
        request_s: float = 120.0,
        retry: Retry | None = None,
    ) -> None:
        """`url` is the base that ends in `/v1`. `options` go into every request: temperature, max_tokens, …"""
        self._name = without_password(f"chat {name or model} ({url})")
        self._url, self._model, self._key = url, model, api_key
        self.options = dict(options or {})
        """What goes into every request, unless a call says otherwise."""
        self._request_s = request_s
        self._retry = retry or Retry(attempts=4, first_s=1.0, most_s=20.0)
        self._places = asyncio.Semaphore(max_connections)
        self._link: Link | None = None

    async def __call__(self, request: Any) -> ChatReply:
        """A service's call: a string, a list of messages, or a dictionary with `messages` and options."""
        options: dict[str, Any] = {}
        if isinstance(request, str):
            messages: Any = [{"role": "user", "content": request}]
        elif isinstance(request, Mapping) and "messages" in request:
            messages = request["messages"]
            options = {key: value for key, value in request.items() if key != "messages"}
        elif isinstance(request, Sequence):
            messages = request
        else:
            raise EngineError(
                f"{self._name}: was asked with a {type(request).__name__}; expected a string, a list of messages, or a "
                "dictionary with `messages`"
            )
        reply = await self.chat(messages, **options)
        if not reply.text and reply.finish == "length":
            raise EngineError(
                f"{self._name}: its reply holds no text (finish_reason 'length'): it has spent all it may say on thinking; raise "
                "max_tokens"
            )
        return reply

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatReply:
        """One answer. `options` go over those of the endpoint. EngineError when there is none."""
        body = {"model": self._model, **self.options, **options, "messages": list(messages), "stream": False}
        link = self._opened()
        async with self._places:
            answer = await link.call("POST", ROUTE, body, within_s=self._request_s, repeatable=False)
        if answer.status != 200:
            remedy = (
                "; set api_key_env to the variable that holds its key" if answer.status in (401, 403) else ""
            )
            raise EngineError(
                f"{self._name}: answered {answer.status}: {error_text(answer.body) or 'without a word'}{remedy}"
            )
        return self._decoded(answer.body)

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None

    def _opened(self) -> Link:
        # Not in the constructor: a session belongs to the loop that runs when it is made.
        if self._link is None:
            limits = Limits(request_s=self._request_s, admin_s=self._request_s)
            self._link = Link(self._url, self._name, limits, self._retry, self._key)
        return self._link

    def _decoded(self, body: bytes) -> ChatReply:
        try:
            reply = msgspec.json.decode(body, type=_Reply)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{self._name}: its reply cannot be read: {error} (it begins {excerpt(body)!r})"
            ) from None
        if not reply.choices:
            raise EngineError(f"{self._name}: its reply has no choices")
        choice, usage = reply.choices[0], reply.usage or _Usage()
        counts = (usage.prompt_tokens or 0, usage.completion_tokens or 0)
        if not all(0 <= count < _MOST_TOKENS for count in counts):
            raise EngineError(
                f"{self._name}: its reply counts {counts[0]} prompt tokens and {counts[1]} of the answer"
            )
        calls = tuple(msgspec.to_builtins(choice.message.tool_calls or ()))
        # One that spent all it may say on thinking has said nothing.
        if choice.message.content is None and not calls and choice.finish_reason != "length":
            raise EngineError(
                f"{self._name}: its reply holds no text (finish_reason {choice.finish_reason!r})"
            )
        return ChatReply(
            choice.message.content or "",
            choice.finish_reason,
            *counts,
            calls,
        )
