"""One rollout's side of the gateway: its calls one after another, and its retries told from its questions."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from paceline.config.gateway import GatewaySection
from paceline.envs.protocol import ChatMessage, Reply
from paceline.envs.recorder import Recorder
from paceline.errors import EnvError
from paceline.runtime.gateway.asked import Answered, Asked, Heading, Said
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.remembered import Remembered
from paceline.runtime.gateway.spoken import Kind, Spoken, goes_on
from paceline.tokens.marks import first_mark
from paceline.tokens.tokenizer import ChatTokenizer
from paceline.tokens.tool_calls import detect_format, read_answer

_KEPT: Final = 64
"""Answers a rollout keeps for retries, the latest: a retry follows its request closely."""

_CLOSE_S: Final = 5.0
"""Seconds a call under way has to come back with its tokens when the endpoint is closed, and then to stop before it is
cancelled again."""

_STUCK_S: Final = 300.0
"""Seconds of being cancelled again and again after which a call does not stop."""


Tell: TypeAlias = Callable[[Sequence[int]], None]


class Calls(Protocol):
    """The model calls of the rollout."""

    recorder: Recorder

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    async def complete(
        self,
        messages: Any,
        *,
        tools: Any = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Reply: ...

    async def generate(
        self,
        token_ids: Any,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Reply: ...

    def stop_strings(self, asked: tuple[str, ...]) -> tuple[str, ...]: ...

    def answer_as(self, message: ChatMessage) -> None: ...

    async def hang_up(self) -> None: ...


class Call:
    """One request on its way to an answer, or answered."""

    __slots__ = ("_news", "asked", "digest", "heading", "is_told", "key", "pieces", "task", "waiting")

    def __init__(self, digest: bytes, key: str | None, asked: Asked) -> None:
        self.digest = digest
        self.key = key
        self.asked: Asked | None = asked
        """None once the answer has been given: a request that repeats it says it again, and a rollout's requests hold its
        conversation many times over."""
        self.task: asyncio.Task[Answered]
        self.heading: Heading | None = None
        """Set before the first piece."""
        self.pieces: list[tuple[int, Kind, str]] = []
        """What can be shown of a streamed answer so far: kept whole, for a retry begins from the beginning."""
        self._news: asyncio.Future[None] | None = None
        self.waiting = 0
        """Requests that wait for the answer."""
        self.is_told = False
        """Whether the answer has been written to one of them."""

    @property
    def is_lost(self) -> bool:
        """Whether whoever asked was gone before the answer was written."""
        return not self.is_told and not self.waiting

    def leaves(self, told: bool) -> None:
        """A request waits no longer; `told` says whether it has been given the answer."""
        self.waiting -= 1
        self.is_told |= told
        if self.is_told and not self.waiting and self.task.done():
            self.asked = None
            self.pieces = [
                (number, kind, "".join([text for *_, text in pieces]))
                for (number, kind), pieces in groupby(self.pieces, lambda piece: piece[:2])
            ]

    def add(self, heading: Heading, number: int, kind: Kind, text: str) -> None:
        """One more piece."""
        self.heading = heading
        self.pieces.append((number, kind, text))
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def more(self, after: int, within_s: float) -> None:
        """Wait for a piece beyond the first `after`, or the end, or until the time is up."""
        if self.task.done() or len(self.pieces) > after:
            return
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        waited: list[asyncio.Future[Any]] = [self.task, self._news]
        await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)


class Session:
    """Serves one rollout."""

    def __init__(
        self, label: str, secret: str, calls: Calls, config: GatewaySection, model: str, format: str
    ) -> None:
        self.label = label
        self.model = model
        self.calls = calls
        self.remembered = Remembered()
        """Conversations that later requests may name."""
        self._secret = secret.encode()
        self._split = config.thinking == "split"
        self._format = format
        self._turn = asyncio.Lock()
        self._answers: list[Call] = []
        self._count = 0
        self._closed = False

    def knows(self, secret: str) -> bool:
        """In the same time for every secret."""
        # Bytes of a header that are no UTF-8 come as surrogates.
        return hmac.compare_digest(self._secret, secret.encode("utf-8", "surrogateescape"))

    # ── a request ──

    def find(self, digest: bytes, headers: Mapping[str, str]) -> Call | None:
        """The call that this request repeats; None if it is a question of its own."""
        key = headers.get("Idempotency-Key")
        retries = headers.get("x-stainless-retry-count", "0") != "0"
        for call in reversed(self._answers):
            if call.digest == digest:
                if key is not None and call.key is not None:
                    is_repeated = key == call.key
                else:
                    is_repeated = retries or call.is_lost
                if is_repeated and not _failed(call):
                    return call
        return None

    def start(self, digest: bytes, headers: Mapping[str, str], asked: Asked) -> Call:
        call = Call(digest, headers.get("Idempotency-Key"), asked)
        call.task = asyncio.get_running_loop().create_task(self._answer(call))
        call.task.add_done_callback(_seen)
        self._answers.append(call)
        if len(self._answers) > _KEPT and self._answers[0].task.done():
            del self._answers[0]
        return call

    async def _answer(self, call: Call) -> Answered:
        async with self._turn:
            if self._closed:
                raise Refused(401, "this rollout is over: its secret is no longer valid", code="rollout_over")
            self._count += 1
            name = f"{self.label}-{self._count}"
            heading = Heading(name, int(time.time()), self.model)
            assert call.asked is not None  # until it is answered
            said = [await self._one(call, call.asked, heading, n) for n in range(call.asked.n)]
            return Answered(name, heading.created, self.model, said=said)

    async def _one(self, call: Call, asked: Asked, heading: Heading, number: int) -> Said:
        calls = self.calls
        spoken = self._spoken(call, asked, heading, number) if asked.stream else None
        tell = None if spoken is None else spoken.take
        if asked.token_ids is not None:
            reply = await calls.generate(
                asked.token_ids, max_tokens=asked.max_tokens, stop=asked.stop, tell=tell
            )
        else:
            reply = await calls.complete(
                asked.messages,
                tools=asked.tools or [],
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                tell=tell,
            )
        turn = calls.recorder.turns[-1]
        prompt = calls.recorder.context_tokens - len(reply.token_ids)
        if self._is_read(asked):
            name = f"{heading.id}-{number}"
            return self._taken_apart(asked, reply, name, prompt, turn.cached_tokens, spoken)
        return Said(
            reply=reply,
            text=reply.text,
            prompt_tokens=prompt,
            cached_tokens=turn.cached_tokens,
            told="" if spoken is None else spoken.text,
        )

    def _is_read(self, asked: Asked) -> bool:
        """Whether calls or thinking are looked for in its answers."""
        return asked.token_ids is None and (bool(asked.tools) or self._split)

    def _spoken(self, call: Call, asked: Asked, heading: Heading, number: int) -> Spoken:
        """Shows what it can of an answer while it is sampled."""
        recorder = self.calls.recorder

        def show(kind: Kind, text: str) -> None:
            prompt = recorder.context_tokens - recorder.call_tokens
            call.add(msgspec.structs.replace(heading, prompt_tokens=prompt), number, kind, text)

        is_read = self._is_read(asked)
        return Spoken(
            self.calls.tokenizer,
            show,
            format=self._format,
            has_tools=is_read and bool(asked.tools),
            split=is_read and self._split,
            stops=self.calls.stop_strings(asked.stop),
        )

    def _taken_apart(
        self, asked: Asked, reply: Reply, name: str, prompt: int, cached: int, spoken: Spoken | None
    ) -> Said:
        """Calls and thinking are read from the text as it was sampled, markup included."""
        tokenizer = self.calls.tokenizer
        ids = reply.token_ids
        if len(ids) and int(ids[-1]) in tokenizer.stop_ids:
            ids = ids[:-1]
        raw = tokenizer.decode(ids, keep_special=True)
        raw = raw[: first_mark(raw, self.calls.stop_strings(asked.stop))]
        answer = read_answer(raw, self._format, asked.tools, split_thinking=self._split)
        apart = answer.content != raw or bool(answer.calls) or self._format == "harmony"
        text = answer.content if apart else reply.text
        told, told_thinking = ("", "") if spoken is None else (spoken.text, spoken.thinking)
        text, thinking = goes_on(told, text), goes_on(told_thinking, answer.thinking)
        named = tuple([(_call_id(name, n), call) for n, call in enumerate(answer.calls)])
        if apart:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thinking:
                message["reasoning_content"] = thinking
            if named:
                message["tool_calls"] = [
                    {
                        "id": id_,
                        "type": "function",
                        "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)},
                    }
                    for id_, call in named
                ]
            self.calls.answer_as(message)
        return Said(
            reply=reply,
            text=text,
            thinking=thinking,
            calls=named,
            prompt_tokens=prompt,
            cached_tokens=cached,
            told=told,
            told_thinking=told_thinking,
        )

    # ── the end ──

    async def close(self) -> None:
        """Answer no more; a call under way is given a moment to come back with its tokens."""
        self._closed = True
        running = [call.task for call in self._answers if not call.task.done()]
        if not running:
            return
        try:
            await self.calls.hang_up()
            await asyncio.wait(running, timeout=_CLOSE_S)
        finally:  # cancelled while it waits, too: nobody is left who would hear the answers
            await self._stop(running)

    async def _stop(self, running: list[asyncio.Task[Answered]]) -> None:
        """Cancel calls until they have stopped, though we are cancelled meanwhile: a call that ran on would hold a place
        of its engine that counts as free. EnvError when they do not stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _STUCK_S
        was_cancelled = False
        while left := [task for task in running if not task.done()]:
            if loop.time() >= until:
                raise EnvError(
                    f"a model call of {self.label} did not stop within {_STUCK_S:g} s of being cancelled: its engine's "
                    "client catches CancelledError and goes on"
                )
            for task in left:
                task.cancel()
            try:
                await asyncio.wait(left, timeout=_CLOSE_S)
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError


def format_of(config: GatewaySection, tokenizer: ChatTokenizer) -> str:
    """How the policy writes tool calls."""
    return detect_format(tokenizer.template_source) if config.tool_format == "auto" else config.tool_format


def _failed(call: Call) -> bool:
    """A failed call is no answer: a retry of it asks again."""
    return call.task.done() and (call.task.cancelled() or call.task.exception() is not None)


def _seen(task: asyncio.Task[Answered]) -> None:
    """Its error belongs to whoever waits for it; nobody may, when the program has gone."""
    if not task.cancelled():
        task.exception()


_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def _call_id(name: str, number: int) -> str:
    """Nine letters and digits, which is what Mistral's template insists on; the same again for the same call."""
    digest = hmac.new(name.encode(), str(number).encode(), "blake2b").digest()
    value = int.from_bytes(digest[:8], "big")
    letters = []
    for _ in range(9):
        value, digit = divmod(value, 36)
        letters.append(_DIGITS[digit])
    return "".join(letters)
