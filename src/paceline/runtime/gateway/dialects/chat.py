"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Said,
    answers,
    call_message,
    event,
    function_tool,
    ignored,
    name_tools,
    stop_strings,
    text_of,
    tools_of,
    wants_usage,
    whole_number,
)
from paceline.runtime.gateway.failures import Refused


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
            "id": f"chatcmpl-{answered.id}",
            "object": "chat.completion",
            "created": answered.created,
            "model": answered.model,
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

    def events(self, asked: Asked, answered: Answered, session: Any) -> list[bytes]:
        head = {
            "id": f"chatcmpl-{answered.id}",
            "object": "chat.completion.chunk",
            "created": answered.created,
            "model": answered.model,
        }
        counts = {"usage": None} if asked.wants_usage else {}
        chunks: list[bytes] = []

        def chunk(
            number: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
        ) -> None:
            choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            chunks.append(event({**head, "choices": [choice], **counts}))

        for number, said in enumerate(answered.said):
            chunk(number, {"role": "assistant", "content": ""})
            if said.thinking:
                chunk(number, {"reasoning_content": said.thinking})
            if said.text:
                wanted = asked.body.get("logprobs")
                chunk(number, {"content": said.text}, logprobs=_logprobs(said, session) if wanted else None)
            for at, (id_, call) in enumerate(said.calls):
                function = {"name": call.name, "arguments": call.arguments}
                chunk(
                    number,
                    {"tool_calls": [{"index": at, "id": id_, "type": "function", "function": function}]},
                )
            chunk(number, {}, said.finish)
        if counts:
            chunks.append(event({**head, "choices": [], "usage": usage(answered.said)}))
        chunks.append(b"data: [DONE]\n\n")
        return chunks

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()


def usage(said: list[Said]) -> dict[str, Any]:
    prompt, sampled = said[0].prompt_tokens, sum(len(one.reply.token_ids) for one in said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": said[0].cached_tokens},
    }


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
