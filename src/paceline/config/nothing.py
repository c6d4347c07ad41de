"""How the config file says "none", which TOML has no word for.

Where a key may be none, the word `"none"` (or `"None"`) means it. Where anything may stand (`Any`, the
arguments of someone's environment), `"none"` is more likely meant as text, so there it takes `"<none>"`. Text
that would be mistaken for either is written with one more pair of quotes or brackets, and read with one less.
"""

from __future__ import annotations

import re

from paceline.config.shape import Shape

_TYPED = re.compile(r'("*)[Nn]one("*)')
_OPAQUE = re.compile(r"(<+)none(>+)")


def word_for_none(shape: Shape) -> str:
    return "<none>" if shape.opaque else "none"


def read_text(text: str, shape: Shape) -> str | None:
    """What `text` in the file means: none, or a text."""
    if not _looks_like_none(text, shape):
        return text
    inner = text[1:-1]
    if shape.opaque:
        return None if inner == "none" else inner
    return inner if text.startswith('"') else None


def write_text(text: str, shape: Shape) -> str:
    """The text that reads back as `text`, and never as none."""
    if not _looks_like_none(text, shape):
        return text
    return f"<{text}>" if shape.opaque else f'"{text}"'


def _looks_like_none(text: str, shape: Shape) -> bool:
    if not (shape.opaque or shape.nullable):
        return False
    found = (_OPAQUE if shape.opaque else _TYPED).fullmatch(text)
    return found is not None and len(found[1]) == len(found[2])
