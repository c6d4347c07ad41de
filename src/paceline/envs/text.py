"""Cutting text that is too long for a prompt, a tool's output above all."""

from __future__ import annotations

from typing import Literal, TypeAlias

CutSide: TypeAlias = Literal["left", "right", "middle"]
"""The side that is removed."""

MARK = "…"


def cut_text(text: str, limit: int, side: CutSide = "right", mark: str = MARK) -> str:
    """At most `limit` characters of `text`, and `mark` where something was removed; `text` itself if it fits.

    `left` removes the beginning, `right` the end, `middle` what is between. Characters are Unicode code points;
    joined ones (a flag, a family, a letter and its accent) are not kept together, but none is ever halved.
    """
    if limit < 0:
        raise ValueError(f"limit is {limit}; expected at least 0 characters")
    if len(text) <= limit:
        return text
    if side == "left":
        return mark + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + mark
    if side == "middle":
        head = (limit + 1) // 2
        return text[:head] + mark + text[len(text) - (limit - head) :]
    raise ValueError(f"side is {side!r}; expected 'left', 'right' or 'middle': the side that is removed")
