"""What a model call is prompted with, before and after it is encoded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.tokens.messages import ChatMessage, Tools

if TYPE_CHECKING:
    from paceline.tokens.conversation import Node

Ids: TypeAlias = NDArray[np.int32]

Roles: TypeAlias = tuple[tuple[str, int], ...]
"""Run-length (role, tokens) over the ids of a plan: whose words they are. Markup of the template, and what cannot be
told, has the role ""; so have tokens that are partly markup."""

Spans: TypeAlias = Sequence[tuple[str, int, int]]
"""(role, start, end) in characters, ascending, without overlap."""

_MARK: Final = "\ue0b1{}\ue0b2"
"""Stands for the content of a message while the template is asked where it puts it."""


class Plan:
    """The prompt of the next model call. `Bridge.encode` fills in `ids` and `roles`."""

    __slots__ = (
        "anchor",
        "base",
        "extends",
        "flags",
        "ids",
        "key",
        "messages",
        "new",
        "roles",
        "spans",
        "text",
        "tools",
        "why",
    )

    def __init__(
        self,
        text: str,
        new: list[ChatMessage],
        tools: Tools | None,
        flags: int,
        *,
        base: Node | None = None,
        messages: list[ChatMessage] | None = None,
        why: str = "",
        spans: Spans = (),
        anchor: int | None = None,
        key: Hashable = None,
        ids: Ids | None = None,
        roles: Roles = (),
    ) -> None:
        self.extends = messages is None
        """True: `ids` come after everything so far. False: they are the whole prompt of a new branch."""
        self.base = base
        """The turn that is gone on from; None in a new branch."""
        self.text = text
        """What `ids` say."""
        self.new = new
        self.messages = messages
        """The whole conversation, when it does not extend a recorded one."""
        self.tools = tools
        self.flags = flags
        self.why = why
        """Why a new branch begins; empty when none does."""
        self.spans = spans
        """Where in `text` the messages' own words stand."""
        self.anchor = anchor
        """The end token that was sampled right before, if one was."""
        self.key = key
        self.ids = ids
        self.roles = roles


def marked(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with a mark in place of each content that is text."""
    return [
        {**message, "content": _MARK.format(number)} if _has_words(message) else message
        for number, message in enumerate(messages)
    ]


def spans_of(text: str, pattern: str, messages: Sequence[ChatMessage]) -> Spans:
    """Where `text` has the contents of `messages`, given `pattern`, the same rendering with marks for them.

    A template that looks into contents (trims them, cuts thinking out) renders other marks than words; then the
    contents are looked for as they are, trimmed, and if that does not give `text` either, nothing is known.
    """
    for trim in (False, True):
        spans: list[tuple[str, int, int]] = []
        pieces: list[str] = []
        at = source = 0
        for number, message in enumerate(messages):
            if not _has_words(message):
                continue
            mark = _MARK.format(number)
            found = pattern.find(mark, source)
            if found < 0:
                continue  # the template leaves this message out
            content = message["content"].strip() if trim else message["content"]
            pieces += (pattern[source:found], content)
            at += found - source
            spans.append((str(message["role"]), at, at + len(content)))
            at += len(content)
            source = found + len(mark)
        pieces.append(pattern[source:])
        if "".join(pieces) == text:
            return spans
    return ()


def _has_words(message: ChatMessage) -> bool:
    content = message.get("content")
    return isinstance(content, str) and content.strip() != ""


def roles_of(spans: Spans, firsts: Sequence[tuple[int, int]], tokens: int) -> Roles:
    """Run-length roles over `tokens` ids; `firsts` are the (first, end) token of each span."""
    runs: list[tuple[str, int]] = []
    at = 0
    for (role, _, _), (first, end) in zip(spans, firsts, strict=True):
        if end <= first or first < at:
            continue
        if first > at:
            runs.append(("", first - at))
        runs.append((role, end - first))
        at = end
    if at < tokens:
        runs.append(("", tokens - at))
    return tuple(runs)
