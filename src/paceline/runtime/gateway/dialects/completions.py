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
    ignored,
    stop_strings,
    wants_usage,
    whole_number,
)
from paceline.runtime.gateway.dialects.chunks import Chunks, head, usage
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


class _Telling(Chunks):
    """The answer as chunks."""

    def __init__(self, asked: Asked, heading: Heading, session: Any) -> None:
        super().__init__(asked, _head(heading))
        self._asked, self._session = asked, session

    def add(self, number: int, kind: Kind, text: str) -> bytes:
        return self.chunk(number, {"text": text})

    def rest(self, number: int, said: Said) -> list[bytes]:
        text = said.text[len(said.told) :]
        logprobs = _logprobs(self._asked, said, self._session)
        told = [self.chunk(number, {"text": text})] if text else []
        return [*told, self.chunk(number, {"text": ""}, said.finish, logprobs)]


def _head(heading: Heading) -> dict[str, Any]:
    return head(heading, "cmpl", "text_completion")


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
