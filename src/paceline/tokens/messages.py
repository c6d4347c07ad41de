"""Chat messages as chat templates take them: JSON-like mappings with a role and a content."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

ChatMessage: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and whatever else the chat template reads (`tool_calls`, `name`, …)."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool descriptions as JSON schemas, in the form the chat template prints."""


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def is_plain(message: ChatMessage) -> bool:
    """A role and a text, and nothing else."""
    return len(message) == 2 and type(message.get("content")) is str and "role" in message


def words_of(message: ChatMessage) -> str:
    """Its text; all that it holds, as JSON, where it holds more or other things than a text."""
    content = message.get("content")
    if isinstance(content, str) and (content or not message.get("tool_calls")):
        return content
    rest = {k: v for k, v in message.items() if k != "role" and v is not None}
    return msgspec.json.encode(rest, enc_hook=str).decode()


def same(a: ChatMessage, b: ChatMessage) -> bool:
    """Whether two messages say the same; a key that is missing and one that is None count as equal."""
    if a == b:
        return True
    return {k: v for k, v in a.items() if v is not None} == {k: v for k, v in b.items() if v is not None}


def same_answer(a: ChatMessage, b: ChatMessage) -> bool:
    """Whether two assistant messages are the same answer: the same words, thinking and calls.

    White space around the words, identifiers of calls, and the way JSON arguments are written do not count: programs
    change them on the way from an answer to their history.
    """
    if a == b:
        return True
    if b.get("role") != "assistant" or _stripped(a.get("content")) != _stripped(b.get("content")):
        return False
    if _stripped(a.get("reasoning_content")) != _stripped(b.get("reasoning_content")):
        return False
    mine, theirs = a.get("tool_calls") or [], b.get("tool_calls") or []
    return len(mine) == len(theirs) and all(_call(x) == _call(y) for x, y in zip(mine, theirs, strict=True))


def _stripped(text: Any) -> Any:
    return text.strip() if isinstance(text, str) else text or ""


def _call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # no JSON: compared as it is written
            arguments = json.loads(arguments)
    return function.get("name"), arguments


def key_of(messages: Sequence[ChatMessage]) -> Hashable:
    """Equal for messages that render alike. TypeError when a message is not JSON-like."""
    if len(messages) == 1 and is_plain(messages[0]):
        return messages[0]["role"], messages[0]["content"]
    return tuple((m["role"], m["content"]) if is_plain(m) else msgspec.json.encode(m) for m in messages)


def key_of_tools(tools: Tools | None) -> bytes:
    """Equal for tool lists that render alike; no tools and an empty list do."""
    return msgspec.json.encode(list(tools)) if tools else b""
