"""A request and its answer, whatever protocol they are spoken in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from paceline.envs.protocol import Reply
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.spoken import Kind
from paceline.tokens.tool_calls import ToolCall


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a program asks for."""

    messages: list[dict[str, Any]] = []
    """As the chat template takes them; empty if `token_ids` are asked to be continued."""
    token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    wants_usage: bool = False
    """Whether a stream is to end with its counts."""
    ignored: tuple[str, ...] = ()
    """What was asked for and is not done: it would change the distribution that is sampled from."""
    body: dict[str, Any]
    """The request as it came."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    reply: Reply
    text: str
    """What is shown: without tool calls, and without thinking if that is split off."""
    thinking: str = ""
    calls: tuple[tuple[str, ToolCall], ...] = ()
    """(identifier, call)."""
    prompt_tokens: int
    cached_tokens: int
    told: str = ""
    """The beginning of `text` that a stream has shown already."""
    told_thinking: str = ""

    @property
    def finish(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        if self.calls:
            return "tool_calls"
        return "length" if self.reply.finish == "length" else "stop"


class Heading(msgspec.Struct, frozen=True):
    """What is known of an answer before it is there."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    prompt_tokens: int = 0


class Answered(Heading, frozen=True, kw_only=True):
    """Everything said to one request."""

    said: list[Said]


class Telling(Protocol):
    """One answer as server-sent events, from its beginning on."""

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        """The events of a piece of answer `number`."""
        ...

    def end(self, answered: Answered) -> bytes:
        """The events of all that was not told in pieces."""
        ...


class Dialect(Protocol):
    """One protocol: JSON in, JSON or server-sent events out."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        """What a request asks for. `Refused` says what is wrong with it."""
        ...

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        """The answer, whole."""
        ...

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        """The answer as server-sent events."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]: ...


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


# ── reading requests ──

_MOST_ANSWERS = 64

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "text",
    "reasoning_effort",
    "reasoning",
    "thinking",
)


def ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what is asked for and left aside: sampling is the run's."""
    named = [name for name in _SAMPLING if body.get(name) is not None]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = choice.get("type")
    if choice not in (None, "auto", "none"):
        named.append("tool_choice")
    return tuple(named)


def wants_no_tools(body: Mapping[str, Any]) -> bool:
    choice = body.get("tool_choice")
    return choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none")


def whole_number(body: Mapping[str, Any], *names: str, least: int = 1) -> int | None:
    """The first of the fields that is there. `Refused` if it is no whole number of at least `least`."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Refused(
                400, f"{name} is {value!r}; expected a whole number of at least {least}", param=name
            )
        return value
    return None


def stop_strings(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    given = body.get(name)
    listed = [given] if isinstance(given, str) else given or []
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise Refused(400, f"{name} must be a text or a list of texts", param=name)
    return tuple(text for text in listed if text)


def answers(body: Mapping[str, Any]) -> int:
    """How many answers are to be drawn to one request."""
    n = whole_number(body, "n") or 1
    if n > _MOST_ANSWERS:
        raise Refused(400, f"n is {n}; at most {_MOST_ANSWERS} answers are drawn to one request", param="n")
    return n


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with its counts."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise Refused(400, "stream_options must be an object", param="stream_options")
    return bool(options.get("include_usage"))


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A content as text: a text, or parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} is a {type(content).__name__}; expected a text or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(400, f"{where} has a part of type {kind!r}: this policy reads text only")
    return "".join(parts)


def call_message(id_: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call as chat templates take it: the arguments an object, if they are one."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def name_tools(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell tool messages the name of the function, where an earlier call has their identifier: templates print it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            if name is not None:
                message["name"] = name
    return messages


def tools_of(
    body: Mapping[str, Any], as_function: Callable[[Mapping[str, Any]], dict[str, Any] | None], instead: str
) -> list[dict[str, Any]] | None:
    """The tools of a request, as chat templates print them; None for none. `as_function` reads one of them, and is None
    for one that this policy cannot call; `instead` says what to give then."""
    listed = body.get("tools")
    if not listed or wants_no_tools(body):
        return None
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise Refused(400, "tools must be a list of objects", param="tools")
    tools = []
    for number, tool in enumerate(listed):
        read = as_function(tool)
        if read is None:
            named = tool.get("name") or tool.get("type")
            text = f"tools[{number}] ({named!r}) is none that this policy can call: {instead}"
            raise Refused(400, text, param="tools")
        tools.append(read)
    return tools


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates print it."""
    if not isinstance(name, str) or not name:
        raise Refused(400, "a tool has no name", param="tools")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description if isinstance(description, str) else "",
            "parameters": parameters
            if isinstance(parameters, dict)
            else {"type": "object", "properties": {}},
        },
    }
