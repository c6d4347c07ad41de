"""Anthropic messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Heading,
    Said,
    Telling,
    call_message,
    event,
    function_tool,
    ignored,
    name_tools,
    stop_strings,
    text_of,
    tools_of,
    whole_number,
)
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.spoken import Kind


class Messages:
    """`POST /v1/messages`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        listed = body.get("messages")
        if not isinstance(listed, list) or not listed:
            raise Refused(400, "messages must be a list of at least one message")
        messages: list[dict[str, Any]] = []
        system = text_of(body.get("system"), "system")
        if system:
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(listed):
            messages += _messages(message, f"messages[{number}]")
        return Asked(
            messages=name_tools(messages),
            tools=tools_of(
                body, _function, "one that Anthropic's servers run has none here; give an input_schema"
            ),
            max_tokens=whole_number(body, "max_tokens"),
            stop=stop_strings(body, "stop_sequences"),
            stream=bool(body.get("stream")),
            ignored=ignored(body),
            body=body,
        )

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        said = answered.said[0]
        return {
            **_head(answered),
            "content": _blocks(said),
            "stop_reason": _stop_reason(said),
            "stop_sequence": None,
            "usage": _usage(said),
        }

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        return _Telling(heading)

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.anthropic()


class _Telling:
    """The answer as the events of its blocks."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._blocks = 0
        self._open: Kind | None = None
        """The block that is being told; None between two."""
        self._has_text = False
        self._is_begun = False

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        block = {"type": "text", "text": text}
        if kind == "thinking":
            block = {"type": "thinking", "thinking": text, "signature": ""}
        start, delta = _as_delta(block)
        told = b"" if self._open == kind else self._close() + self._beginning() + self._start(start)
        self._open = kind
        self._has_text |= kind == "text"
        return told + _event("content_block_delta", index=self._blocks, delta=delta)

    def end(self, answered: Answered) -> bytes:
        said = answered.said[0]
        told = self._beginning()
        if thinking := said.thinking[len(said.told_thinking) :]:
            told += self.add(0, "thinking", thinking)
        text = said.text[len(said.told) :]
        if text or not (said.calls or self._has_text):
            told += self.add(0, "text", text)
        told += self._close()
        for block in _calls(said):
            start, delta = _as_delta(block)
            told += self._start(start) + _event("content_block_delta", index=self._blocks, delta=delta)
            told += self._stop()
        counted = _usage(said)
        return (
            told
            + _event(
                "message_delta",
                delta={"stop_reason": _stop_reason(said), "stop_sequence": None},
                usage=counted,  # what was cached is known only now
            )
            + _event("message_stop")
        )

    def _beginning(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = {
            "input_tokens": self._heading.prompt_tokens,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        opening: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message={**_head(self._heading), **opening})

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._stop()

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _head(heading: Heading) -> dict[str, Any]:
    return {
        "id": f"msg_{heading.id}",
        "type": "message",
        "role": "assistant",
        "model": heading.model,
    }


def _usage(said: Said) -> dict[str, Any]:
    return {
        "input_tokens": said.prompt_tokens - said.cached_tokens,
        "cache_read_input_tokens": said.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(said.reply.token_ids),
    }


def _stop_reason(said: Said) -> str:
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(said.finish, "end_turn")


def _blocks(said: Said) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.thinking:
        # Only we will be shown it again, and the text itself is proof enough.
        blocks.append({"type": "thinking", "thinking": said.thinking, "signature": ""})
    if said.text or not said.calls:
        blocks.append({"type": "text", "text": said.text})
    return blocks + _calls(said)


def _calls(said: Said) -> list[dict[str, Any]]:
    return [
        {"type": "tool_use", "id": id_, "name": call.name, "input": msgspec.json.decode(call.arguments)}
        for id_, call in said.calls
    ]


def _as_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as it begins, and what is then added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    partial = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": partial}


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One of theirs is several of ours: results of tools have messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"{where} has the role {role!r}; expected user or assistant")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    return _assistant(content, where) if role == "assistant" else _user(content, where, role)


def _user(content: list[Any], where: str, role: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            said = text_of(part.get("content"), f"{where}.content")
            results.append(
                {"role": "tool", "content": said, "tool_call_id": str(part.get("tool_use_id") or "")}
            )
        else:
            texts.append(part)
    if texts:
        results.append({"role": role, "content": text_of(texts, f"{where}.content")})
    return results


def _assistant(content: list[Any], where: str) -> list[dict[str, Any]]:
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            calls.append(
                call_message(str(part.get("id") or ""), str(part.get("name")), part.get("input") or {})
            )
        elif kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(part)
    read: dict[str, Any] = {"role": "assistant", "content": text_of(texts, f"{where}.content")}
    if thoughts:
        read["reasoning_content"] = "\n".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return [read]


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    if tool.get("type") not in (None, "custom") or "input_schema" not in tool:
        return None
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
