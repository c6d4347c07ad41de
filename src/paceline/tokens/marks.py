"""Marks in a text that is still growing: stop strings, tags, and what calls begin with."""

from __future__ import annotations

from collections.abc import Sequence


def first_mark(text: str, marks: Sequence[str]) -> int | None:
    """Where the first of the marks begins; None if there is none."""
    return min([at for mark in marks if (at := text.find(mark)) >= 0], default=None)


def sure_of(text: str, marks: Sequence[str]) -> int:
    """Characters of `text`, which has no mark, that none can begin in if it goes on."""
    held = 0
    for mark in marks:
        longest = min(len(mark) - 1, len(text))
        held = max(held, next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0))
    return len(text) - held


def may_be_in(tail: str, stop: tuple[str, ...]) -> bool:
    """Whether `tail` ends with the beginning of a stop string, or with half a character."""
    if tail.endswith("\ufffd"):
        return True
    return sure_of(tail, stop) < len(tail)
