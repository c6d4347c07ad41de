"""Anthropic messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Said,
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
            **self._head(answered),
            "content": _blocks(said),
            "stop_reason": _stop_reason(said),
            "stop_sequence": None,
            "usage": _usage(said),
        }

    def events(self, asked: Asked, answered: Answered, session: Any) -> list[bytes]:
        said = answered.said[0]
        counted = _usage(said)
        opening = {
            **self._head(answered),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**counted, "output_tokens": 0},
        }
        events: list[bytes] = []

        def tell(kind: str, **data: Any) -> None:
            events.append(event({"type": kind, **data}, kind))

        tell("message_start", message=opening)
        for number, block in enumerate(_blocks(said)):
            start, delta = _as_delta(block)
            tell("content_block_start", index=number, content_block=start)
            tell("content_block_delta", index=number, delta=delta)
            tell("content_block_stop", index=number)
        tell(
            "message_delta",
            delta={"stop_reason": _stop_reason(said), "stop_sequence": None},
            usage={"output_tokens": counted["output_tokens"]},
        )
        tell("message_stop")
        return events

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.anthropic()

    def _head(self, answered: Answered) -> dict[str, Any]:
        return {
            "id": f"msg_{answered.id}",
            "type": "message",
            "role": "assistant",
            "model": answered.model,
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
    for id_, call in said.calls:
        blocks.append(
            {"type": "tool_use", "id": id_, "name": call.name, "input": msgspec.json.decode(call.arguments)}
        )
    return blocks


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
