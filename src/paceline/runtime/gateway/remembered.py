"""Conversations that later requests may name by the identifier of an answer, as OpenAI's responses are.

    resp_1 ─── resp_2 ─── resp_3        each holds what came after the one before it
       └────── resp_4                   a conversation that went on from an earlier answer

Programs name the last answer, or say everything again each time. Either way a conversation of n answers takes as much
room as its messages, not n times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


class Remembered:
    """The conversations of one rollout, up to each of its answers."""

    def __init__(self) -> None:
        self._upto: dict[str, _Part] = {}
        self._last: _Part | None = None

    def add(self, name: str, messages: Sequence[Message]) -> None:
        """Keep the conversation that ends with answer `name`. The messages must not be changed any more."""
        if name not in self._upto:
            self._last = self._upto[name] = _part(messages, self._last)

    def find(self, name: str) -> list[Message] | None:
        """A copy of the conversation that ends with this answer; None where there is no such answer."""
        part = self._upto.get(name)
        return None if part is None else deepcopy(part.whole())


class _Part:
    """The end of a conversation, and what it stands behind."""

    __slots__ = ("before", "count", "messages")

    def __init__(self, before: _Part | None, messages: Sequence[Message]) -> None:
        self.before = before
        self.messages = tuple(messages)
        self.count: int = len(messages) + (0 if before is None else before.count)
        """Messages up to its end."""

    def whole(self) -> list[Message]:
        parts = []
        part: _Part | None = self
        while part is not None:
            parts.append(part.messages)
            part = part.before
        return [message for messages in reversed(parts) for message in messages]


def _part(messages: Sequence[Message], last: _Part | None) -> _Part:
    """The conversation, sharing what it has in common with the one that was kept last."""
    known = [] if last is None else last.whole()
    same = 0
    while same < min(len(known), len(messages)) and known[same] == messages[same]:
        same += 1
    before = last
    while before is not None and before.count > same:
        before = before.before
    return _Part(before, messages[0 if before is None else before.count :])
