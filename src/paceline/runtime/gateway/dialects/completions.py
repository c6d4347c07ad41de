"""OpenAI completions: a prompt as text or as ids, continued."""

from __future__ import annotations

from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Heading,
    Said,
    Telling,
    answers,
    event,
    ignored,
    stop_strings,
    wants_usage,
    whole_number,
)
from paceline.runtime.gateway.dialects.chat import usage
from paceline.runtime.gateway.failures import Refused
from paceline.runtime.gateway.spoken import Kind


class Completions:
    """`POST /v1/completions`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        for name in ("echo", "suffix"):
            if body.get(name):
                raise Refused(400, f"{name} is not served: the policy only goes on from a prompt", param=name)
        best = whole_number(body, "best_of")
        n = answers(body)
        if best is not None and best != n:
            raise Refused(400, f"best_of is {best} and n {n}: every answer drawn is given", param="best_of")
        return Asked(
            token_ids=prompt_ids(body.get("prompt"), session),
            max_tokens=whole_number(body, "max_tokens"),
            stop=stop_strings(body),
            n=n,
            stream=bool(body.get("stream")),
            wants_usage=wants_usage(body),
            ignored=ignored(body),
            body=body,
        )

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        return {
            **_head(answered),
            "choices": [
                {
                    "index": number,
                    "text": said.text,
                    "finish_reason": said.finish,
                    "logprobs": _logprobs(asked, said, session),
                }
                for number, said in enumerate(answered.said)
            ],
            "usage": usage(answered.said),
        }

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        return _Telling(asked, heading, session)

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()


class _Telling:
    """The answer as chunks."""

    def __init__(self, asked: Asked, heading: Heading, session: Any) -> None:
        self._asked, self._session = asked, session
        self._head = _head(heading)

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        return self._chunk(number, text)

    def end(self, answered: Answered) -> bytes:
        chunks = []
        for number, said in enumerate(answered.said):
            rest = said.text[len(said.told) :]
            logprobs = _logprobs(self._asked, said, self._session)
            if rest:
                chunks.append(self._chunk(number, rest))
            chunks.append(self._chunk(number, "", said.finish, logprobs))
        if self._asked.wants_usage:
            chunks.append(event({**self._head, "choices": [], "usage": usage(answered.said)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def _chunk(self, number: int, text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": number, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return event({**self._head, "choices": [choice]})


def _head(heading: Heading) -> dict[str, Any]:
    return {
        "id": f"cmpl-{heading.id}",
        "object": "text_completion",
        "created": heading.created,
        "model": heading.model,
    }


def prompt_ids(prompt: Any, session: Any) -> list[int]:
    """Token ids of a prompt given as text or as ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids: list[int] = session.calls.tokenizer.encode(prompt).tolist()
        return ids
    return checked_ids(prompt, "prompt", session)


def checked_ids(ids: Any, name: str, session: Any) -> list[int]:
    size = session.calls.tokenizer.vocab_size
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < size for i in ids):
        raise Refused(
            400, f"{name} must be one text, or one list of token ids from 0 to {size - 1}", param=name
        )
    return ids


def _logprobs(asked: Asked, said: Said, session: Any) -> dict[str, Any] | None:
    if asked.body.get("logprobs") is None:
        return None
    tokenizer = session.calls.tokenizer
    texts = [tokenizer.decode([i], keep_special=True) for i in said.reply.token_ids.tolist()]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": said.reply.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }
