"""OpenAI completions: a prompt as text or as ids, continued."""

from __future__ import annotations

from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Said,
    answers,
    event,
    ignored,
    stop_strings,
    wants_usage,
    whole_number,
)
from paceline.runtime.gateway.dialects.chat import usage
from paceline.runtime.gateway.failures import Refused


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
            **self._head(answered),
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

    def events(self, asked: Asked, answered: Answered, session: Any) -> list[bytes]:
        head = self._head(answered)
        chunks = []
        for number, said in enumerate(answered.said):
            logprobs = _logprobs(asked, said, session)
            for text, finish in ((said.text, None), ("", said.finish)):
                choice = {"index": number, "text": text, "finish_reason": finish, "logprobs": logprobs}
                chunks.append(event({**head, "choices": [choice]}))
                logprobs = None
        if asked.wants_usage:
            chunks.append(event({**head, "choices": [], "usage": usage(answered.said)}))
        return [*chunks, b"data: [DONE]\n\n"]

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()

    def _head(self, answered: Answered) -> dict[str, Any]:
        return {
            "id": f"cmpl-{answered.id}",
            "object": "text_completion",
            "created": answered.created,
            "model": answered.model,
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
