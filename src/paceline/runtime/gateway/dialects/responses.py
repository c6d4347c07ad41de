"""OpenAI responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    text_of,
    tools_of,
    whole_number,
)
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.spoken import Kind

_KINDS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Responses:
    """`POST /v1/responses`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        if body.get("background"):
            raise Refused(400, "background responses are not served", param="background")
        messages: list[dict[str, Any]] = []
        before = body.get("previous_response_id")
        if before is not None:
            history = session.remembered.find(str(before))
            if history is None:
                raise Refused(
                    404, f"this rollout has given no response {before!r}", param="previous_response_id"
                )
            messages += history  # a copy: what is put behind may be added to its last message
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
            **_head(asked, answered),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(answered, said),
            "usage": _usage(said),
        }

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        return _Telling(self, asked, heading, session)

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()


class _Telling:
    """The answer as the events of its items. Thinking is an item of its own, told whole before the text."""

    def __init__(self, dialect: Responses, asked: Asked, heading: Heading, session: Any) -> None:
        self._dialect, self._asked, self._heading, self._session = dialect, asked, heading, session
        self._count = 0
        self._items = 0
        self._thinking = ""
        self._text = ""

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        if kind == "thinking":
            self._thinking += text
            return self._beginning()
        told = self._beginning() + (b"" if self._text else self._thought() + self._message())
        self._text += text
        return told + self._event("response.output_text.delta", **self._at(), delta=text, logprobs=[])

    def end(self, answered: Answered) -> bytes:
        said = answered.said[0]
        whole = self._dialect.write(self._asked, answered, self._session)
        told = self._beginning()
        self._thinking += said.thinking[len(said.told_thinking) :]
        if text := said.text[len(said.told) :]:
            told += self.add(0, "text", text)
        elif not self._text:
            told += self._thought()
        if self._text or not said.calls:
            told += b"" if self._text else self._message()
            item = _message(self._heading, self._text)
            part = item["content"][0]
            told += self._event("response.output_text.done", **self._at(), text=self._text, logprobs=[])
            told += self._event("response.content_part.done", **self._at(), part=part)
            told += self._done(item)
        for item in _calls(said):
            place = {"output_index": self._items, "item_id": item["id"]}
            told += self._added({**item, "status": "in_progress", "arguments": ""})
            told += self._event(
                "response.function_call_arguments.delta", **place, delta=item["arguments"]
            ) + self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
            told += self._done(item)
        cut = whole["status"] == "incomplete"
        return told + self._event("response.incomplete" if cut else "response.completed", response=whole)

    def _beginning(self) -> bytes:
        if self._count:
            return b""
        opening = {
            **_head(self._asked, self._heading),
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._event("response.created", response=opening) + self._event(
            "response.in_progress", response=opening
        )

    def _thought(self) -> bytes:
        """The item of the thinking, if there was any."""
        if not self._thinking:
            return b""
        item = _reasoning(self._heading, self._thinking)
        return self._added(item) + self._done(item)

    def _message(self) -> bytes:
        item = _message(self._heading, "")
        (part,) = item["content"]
        return self._added({**item, "status": "in_progress", "content": []}) + self._event(
            "response.content_part.added", **self._at(), part=part
        )

    def _at(self) -> dict[str, Any]:
        """Where the text stands."""
        return {"output_index": self._items, "item_id": f"msg_{self._heading.id}", "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=self._items, item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._items += 1
        return self._event("response.output_item.done", output_index=self._items - 1, item=item)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._count += 1
        return event({"type": kind, "sequence_number": self._count - 1, **data}, kind)


def _head(asked: Asked, heading: Heading) -> dict[str, Any]:
    body = asked.body
    return {
        "id": f"resp_{heading.id}",
        "object": "response",
        "created_at": heading.created,
        "model": heading.model,
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
    """Keep the conversation for a request that names this response, unless it is not to be stored. Instructions are not
    part of it, as OpenAI has it: each request gives its own."""
    if asked.body.get("store") is False:
        return
    said = answered.said[0]
    history = list(asked.messages)
    if asked.body.get("instructions"):
        history = history[1:]
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thinking:
        message["reasoning_content"] = said.thinking
    if said.calls:
        message["tool_calls"] = [call_message(id_, call.name, call.arguments) for id_, call in said.calls]
    session.remembered.add(f"resp_{answered.id}", [*history, message])


def _items(heading: Heading, said: Said) -> list[dict[str, Any]]:
    items = [_reasoning(heading, said.thinking)] if said.thinking else []
    if said.text or not said.calls:
        items.append(_message(heading, said.text))
    return items + _calls(said)


def _reasoning(heading: Heading, text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": f"rs_{heading.id}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _message(heading: Heading, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{heading.id}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def _calls(said: Said) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call",
            "id": f"fc_{id_}",
            "call_id": id_,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for id_, call in said.calls
    ]


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
