"""A stream as OpenAI's two older routes have it: chunks of choices, the counts if they are asked for, and `[DONE]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from paceline.runtime.gateway.asked import Answered, Asked, Heading, Said, event


class Chunks(ABC):
    """One answer as chunks; a route says what a choice holds."""

    def __init__(self, asked: Asked, head: dict[str, Any]) -> None:
        self._head = head
        self._wants_usage = asked.wants_usage
        self._counts: dict[str, Any] = {"usage": None} if asked.wants_usage else {}

    @abstractmethod
    def rest(self, number: int, said: Said) -> list[bytes]:
        """The chunks of what has not been told of an answer that has ended, the one with its finish reason last."""

    def end(self, answered: Answered) -> bytes:
        chunks = [chunk for number, said in enumerate(answered.said) for chunk in self.rest(number, said)]
        if self._wants_usage:
            chunks.append(event({**self._head, "choices": [], "usage": usage(answered.said)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def chunk(
        self, number: int, says: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": number, **says, "finish_reason": finish, "logprobs": logprobs}
        return event({**self._head, "choices": [choice], **self._counts})


def head(heading: Heading, prefix: str, kind: str) -> dict[str, Any]:
    """What every chunk, and a whole answer, begins with."""
    return {
        "id": f"{prefix}-{heading.id}",
        "object": kind,
        "created": heading.created,
        "model": heading.model,
    }


def usage(said: list[Said]) -> dict[str, Any]:
    prompt, sampled = said[0].prompt_tokens, sum(len(one.reply.token_ids) for one in said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": said[0].cached_tokens},
    }
