"""A chat endpoint in the policy's place, as one rollout sees it: messages out, text in.

For measuring other models in the environments that a policy is trained in. Nothing of it can train: an endpoint says how
many tokens it sampled and not which, so they stand in the record with the id -1.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.rollout import Finish, Limit, Message, Turn
from paceline.envs.protocol import ChatMessage, Environment, Reply, RolloutTruncated, Says, messages_of
from paceline.envs.tool_env import ToolEnv
from paceline.envs.tools import TaggedCalls
from paceline.errors import EngineError, EnvError, ModelCallFailed
from paceline.ports import Chat, ChatReply
from paceline.runtime.calls import Calls, EnvRuntime
from paceline.tokens.messages import words_of

_CHARS: Final = 4
"""Characters of a token, about."""

CALLS: Final = TaggedCalls()
"""How an endpoint's calls stand in the text that environments read, whatever the policy writes."""


def reads_calls(environment: Environment) -> None:
    """Make an environment read calls as they stand here. One in a worker reads what it reads."""
    if isinstance(environment, ToolEnv) and environment.declares_tools:
        environment.call_format = CALLS


class _Turns:
    """The record: lengths alone."""

    __slots__ = ("sampled_tokens", "turns")

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.sampled_tokens = 0

    def add(self, reply: ChatReply, finish: Finish, started: float, ended: float) -> Turn:
        sampled = reply.sampled_tokens
        ids = _unknown(sampled)
        logprobs = np.full(sampled, np.nan, np.float32)
        turn = Turn(
            _unknown(reply.prompt_tokens),
            ids,
            logprobs,
            ((0, sampled),),
            extends=False,
            finish=finish,
            started=started,
            ended=ended,
        )
        self.turns.append(turn)
        self.sampled_tokens += sampled
        return turn


class ChatCalls(Calls):
    """The `Model` of one rollout that a chat endpoint plays."""

    __slots__ = ("_chat", "_clock", "_context", "_history", "_tools")

    recorder: _Turns

    def __init__(self, chat: Chat, shared: EnvRuntime, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(shared, _Turns(), shared.limits.max_context)
        self._chat = chat
        self._clock = clock
        self._history: list[dict[str, Any]] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._context = 0
        """Tokens of the latest prompt and its answer, as the endpoint counts."""

    # ── what an environment calls ──

    async def chat(
        self, *says: Says, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply:
        new = [dict(message) for said in says for message in messages_of(said)]
        return await self._asked(self._followed_by(new), tools, max_tokens, ())

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        return await self._asked([dict(message) for message in messages], tools or (), max_tokens, stop)

    async def generate(
        self,
        token_ids: Sequence[int] | NDArray[np.int32],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        raise EnvError(
            "generate() continues token ids, and a chat endpoint takes messages: only engines play this one"
        )

    def messages(self) -> tuple[Message, ...]:
        return tuple([Message(str(m.get("role")), words_of(m)) for m in self._history])

    # ── a turn ──

    async def _asked(
        self,
        history: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> Reply:
        if not self._enter():
            await self._refuse()
        try:
            self._history = history
            self._tools = self._tools if tools is None else tools
            allowed, cut = self._allowance(max_tokens, self._context)
            options = self._options(allowed, stop)
            began = self._clock()
            try:
                reply = self._counted(await self._answer(options))
            finally:
                ended = self._clock()
                self.model_s += ended - began
            return self._recorded(reply, cut, began, ended)
        finally:
            self._leave()

    async def _answer(self, options: dict[str, Any]) -> ChatReply:
        call = asyncio.ensure_future(self._chat.chat(self._history, **options))
        self.where, self.pending = "engine", call
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            if self.stop is None and self.limit is not None:
                raise RolloutTruncated(self.limit, f"the rollout has used up its {self.limit_text}") from None
            raise
        except EngineError as error:
            self.engine_error = str(error)
            raise ModelCallFailed(self.engine_error) from error
        finally:
            self.where, self.pending = "env", None

    def _counted(self, reply: ChatReply) -> ChatReply:
        """With tokens at four characters each, where the endpoint does not count: budgets have to end some time."""
        prompt, sampled = reply.prompt_tokens, reply.sampled_tokens
        if not prompt:
            prompt = sum(len(words_of(message)) for message in self._history) // _CHARS + 1
        if not sampled:
            called = sum(len(call["function"]["arguments"]) for call in reply.tool_calls)
            sampled = (len(reply.text) + called) // _CHARS + 1
        return msgspec.structs.replace(reply, prompt_tokens=prompt, sampled_tokens=sampled)

    def _recorded(self, reply: ChatReply, cut: Limit | None, began: float, ended: float) -> Reply:
        finish: Finish = "length" if reply.finish == "length" else "stop"
        turn = self.recorder.add(reply, finish, began, ended)
        self._context = reply.prompt_tokens + reply.sampled_tokens
        self.cut = cut if finish == "length" else None
        said: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            said["tool_calls"] = reply.tool_calls
        self._history.append(said)
        text = "\n".join([*([reply.text] if reply.text else []), *map(_tagged, reply.tool_calls)])
        self.last = Reply(text, finish, turn.sampled_ids, turn.logprobs)
        return self.last

    def _options(self, allowed: int, stop: Sequence[str]) -> dict[str, Any]:
        """What is asked for. What is the endpoint's default is left out: some refuse even that. What `[chat.NAME]` sets, stands."""
        sampling = self._sampling
        options: dict[str, Any] = {"max_tokens": allowed}
        if sampling.temperature != 1.0:
            options["temperature"] = sampling.temperature
        if sampling.top_p != 1.0:
            options["top_p"] = sampling.top_p
        if stops := [*sampling.stop, *stop]:
            options["stop"] = stops
        if self._tools:
            options["tools"] = list(self._tools)
        return {name: value for name, value in options.items() if name not in self._chat.options}

    def _followed_by(self, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with what is said now, in the form that endpoints insist on: each call answered by one `tool` message
        under the endpoint's own name for it, or no call and no such message at all."""
        *before, last = self._history or [{}]
        calls = last.get("tool_calls", ())
        results = list(itertools.takewhile(lambda message: message.get("role") == "tool", new))
        if calls and len(results) == len(calls):
            for message, call in zip(results, calls, strict=True):
                message["tool_call_id"] = call["id"]
        else:
            if calls and self.last is not None:
                last = {"role": "assistant", "content": self.last.text}
            for message in results:
                for name in ("tool_call_id", "name"):
                    message.pop(name, None)
                message["role"] = "user"
        return [*before, *([last] if self._history else []), *new]


def _tagged(call: Mapping[str, Any]) -> str:
    return CALLS.written(call["function"]["name"], call["function"]["arguments"])


def _unknown(tokens: int) -> NDArray[np.int32]:
    ids = np.full(tokens, -1, np.int32)
    ids.flags.writeable = False
    return ids
