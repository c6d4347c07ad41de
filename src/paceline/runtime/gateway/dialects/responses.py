"""OpenAI responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Said,
    call_message,
    event,
    function_tool,
    ignored,
    name_tools,
    text_of,
    tools_of,
    whole_number,
)
from paceline.runtime.gateway.failures import Refused

_KINDS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Responses:
    """`POST /v1/responses`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        if body.get("background"):
            raise Refused(400, "background responses are not served", param="background")
        messages: list[dict[str, Any]] = []
        before = body.get("previous_response_id")
        if before is not None:
            history = session.history.get(str(before))
            if history is None:
                raise Refused(
                    404, f"this rollout has given no response {before!r}", param="previous_response_id"
                )
            messages += history
        given = body.get("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        elif isinstance(given, list):
            for number, item in enumerate(given):
                _add(messages, item, f"input[{number}]")
        else:
            raise Refused(400, "input must be a text or a list of items", param="input")
        if not messages:
            raise Refused(400, "input holds no message", param="input")
        instructions = body.get("instructions")
        if isinstance(instructions, str) and instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        return Asked(
            messages=name_tools(messages),
            tools=tools_of(
                body, _function, "one that runs on OpenAI's servers has none here; give functions"
            ),
            max_tokens=whole_number(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            ignored=ignored(body),
            body=body,
        )

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        said = answered.said[0]
        remember(asked, answered, session)
        cut = said.finish == "length"
        return {
            **self._head(asked, answered),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(answered, said),
            "usage": _usage(said),
        }

    def events(self, asked: Asked, answered: Answered, session: Any) -> list[bytes]:
        whole = self.write(asked, answered, session)
        opening = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[bytes] = []

        def tell(kind: str, **data: Any) -> None:
            events.append(event({"type": kind, "sequence_number": len(events), **data}, kind))

        tell("response.created", response=opening)
        tell("response.in_progress", response=opening)
        for number, item in enumerate(whole["output"]):
            place = {"output_index": number, "item_id": item["id"]}
            if item["type"] == "message":
                part = item["content"][0]
                at = {**place, "content_index": 0}
                tell(
                    "response.output_item.added",
                    output_index=number,
                    item={**item, "status": "in_progress", "content": []},
                )
                tell("response.content_part.added", **at, part={**part, "text": ""})
                if part["text"]:
                    tell("response.output_text.delta", **at, delta=part["text"], logprobs=[])
                tell("response.output_text.done", **at, text=part["text"], logprobs=[])
                tell("response.content_part.done", **at, part=part)
            elif item["type"] == "function_call":
                tell(
                    "response.output_item.added",
                    output_index=number,
                    item={**item, "status": "in_progress", "arguments": ""},
                )
                tell("response.function_call_arguments.delta", **place, delta=item["arguments"])
                tell(
                    "response.function_call_arguments.done",
                    **place,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            else:
                tell("response.output_item.added", output_index=number, item=item)
            tell("response.output_item.done", output_index=number, item=item)
        cut = whole["status"] == "incomplete"
        tell("response.incomplete" if cut else "response.completed", response=whole)
        return events

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()

    def _head(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        body = asked.body
        return {
            "id": f"resp_{answered.id}",
            "object": "response",
            "created_at": answered.created,
            "model": answered.model,
            "error": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": asked.max_tokens,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none" if asked.tools is None else "auto",
            "tools": body.get("tools") or [],
            "top_p": None,
        }


def remember(asked: Asked, answered: Answered, session: Any) -> None:
    """Keep the conversation for a request that names this response. Instructions are not part of it, as OpenAI has
    it: each request gives its own."""
    said = answered.said[0]
    history = list(asked.messages)
    if asked.body.get("instructions"):
        history = history[1:]
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thinking:
        message["reasoning_content"] = said.thinking
    if said.calls:
        message["tool_calls"] = [call_message(id_, call.name, call.arguments) for id_, call in said.calls]
    session.history[f"resp_{answered.id}"] = [*history, message]


def _items(answered: Answered, said: Said) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.thinking:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{answered.id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": said.thinking}],
            }
        )
    if said.text or not said.calls:
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answered.id}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for id_, call in said.calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{id_}",
                "call_id": id_,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _usage(said: Said) -> dict[str, Any]:
    sampled = len(said.reply.token_ids)
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": said.cached_tokens},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + sampled,
    }


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """One item of the input. What an assistant said in several items is one message of a chat template."""
    if not isinstance(item, dict):
        raise Refused(400, f"{where} must be an object", param=where)
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            raise Refused(400, f"{where} has the role {role!r}", param=where)
        text = text_of(item.get("content"), f"{where}.content", _KINDS)
        if role == "assistant":
            _assistant(messages)["content"] += text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        call = call_message(
            str(item.get("call_id") or ""), str(item.get("name")), item.get("arguments") or "{}"
        )
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        said = text_of(item.get("output"), f"{where}.output", _KINDS)
        messages.append({"role": "tool", "content": said, "tool_call_id": str(item.get("call_id") or "")})
    elif kind == "reasoning":
        thought = text_of(item.get("content"), f"{where}.content", _KINDS)
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise Refused(400, f"{where} is of type {kind!r}, which this policy cannot read", param=where)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that an item adds to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    if tool.get("type") != "function":
        return None
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))
