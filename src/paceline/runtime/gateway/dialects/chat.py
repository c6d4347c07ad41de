"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Heading,
    Said,
    Telling,
    answers,
    call_message,
    function_tool,
    ignored,
    name_tools,
    stop_strings,
    text_of,
    tools_of,
    wants_usage,
    whole_number,
)
from paceline.runtime.gateway.dialects.chunks import Chunks, head, usage
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.spoken import Kind


class Chat:
    """`POST /v1/chat/completions`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        listed = body.get("messages")
        if not isinstance(listed, list) or not listed:
            raise Refused(400, "messages must be a list of at least one message", param="messages")
        return Asked(
            messages=name_tools([_message(message, number) for number, message in enumerate(listed)]),
            tools=tools_of(body, _function, "give one of type 'function'"),
            max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
            stop=stop_strings(body),
            n=answers(body),
            stream=bool(body.get("stream")),
            wants_usage=wants_usage(body),
            ignored=ignored(body),
            body=body,
        )

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        return {
            **head(answered, "chatcmpl", "chat.completion"),
            "choices": [
                {
                    "index": number,
                    "message": _said(said),
                    "finish_reason": said.finish,
                    "logprobs": _logprobs(said, session) if asked.body.get("logprobs") else None,
                }
                for number, said in enumerate(answered.said)
            ],
            "usage": usage(answered.said),
        }

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        return _Telling(asked, heading, session)

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()


class _Telling(Chunks):
    """The answer as chunks."""

    def __init__(self, asked: Asked, heading: Heading, session: Any) -> None:
        super().__init__(asked, head(heading, "chatcmpl", "chat.completion.chunk"))
        self._asked, self._session = asked, session
        self._begun = -1

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        name = "content" if kind == "text" else "reasoning_content"
        return self._beginning(number) + self._delta(number, {name: text})

    def rest(self, number: int, said: Said) -> list[bytes]:
        chunks = [self._beginning(number)]
        logprobs = _logprobs(said, self._session) if self._asked.body.get("logprobs") else None
        if thinking := said.thinking[len(said.told_thinking) :]:
            chunks.append(self.add(number, "thinking", thinking))
        if text := said.text[len(said.told) :]:
            chunks.append(self._delta(number, {"content": text}, None, logprobs))
            logprobs = None
        for at, (id_, call) in enumerate(said.calls):
            function = {"name": call.name, "arguments": call.arguments}
            called = {"index": at, "id": id_, "type": "function", "function": function}
            chunks.append(self._delta(number, {"tool_calls": [called]}))
        return [*chunks, self._delta(number, {}, said.finish, logprobs)]

    def _beginning(self, number: int) -> bytes:
        """What an answer begins with: nothing, when it has begun. They are drawn, and so told, one after another."""
        if number <= self._begun:
            return b""
        self._begun = number
        return self._delta(number, {"role": "assistant", "content": ""})

    def _delta(
        self, number: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> bytes:
        return self.chunk(number, {"delta": delta}, finish, logprobs)


def _said(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.thinking:
        message["reasoning_content"] = said.thinking
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id_, call in said.calls
        ]
    return message


def _logprobs(said: Said, session: Any) -> dict[str, Any]:
    tokenizer = session.calls.tokenizer
    content = []
    for id_, logprob in zip(said.reply.token_ids.tolist(), said.reply.logprobs.tolist(), strict=True):
        text = tokenizer.decode([id_], keep_special=True)
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(400, f"{where} must be an object with a role", param=where)
    role = message["role"]
    if role == "user" and isinstance(message.get("content"), str):  # most of a long history
        return {"role": role, "content": message["content"]}
    if role == "developer":
        role = "system"
    if role == "function":
        role = "tool"
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(400, f"{where} has the role {role!r}", param=where)
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    read: dict[str, Any] = {
        "role": role,
        "content": text_of(message.get("content"), f"{where}.content", kinds),
    }
    if role == "tool" and message.get("tool_call_id"):
        read["tool_call_id"] = str(message["tool_call_id"])
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str) and thought:
            read["reasoning_content"] = thought
        listed = message.get("tool_calls") or []
        if not isinstance(listed, list):
            raise Refused(400, f"{where}.tool_calls must be a list", param=where)
        calls = [_call(call, f"{where}.tool_calls") for call in listed]
        if calls:
            read["tool_calls"] = calls
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{where} must be calls of functions, each with a name", param=where)
    return call_message(str(call.get("id") or ""), function["name"], function.get("arguments") or "{}")


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return None
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))
