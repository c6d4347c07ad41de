"""What is expected at a place, in words: for error messages, `--help` and the reference alike."""

from __future__ import annotations

import datetime
import difflib
import enum
import pathlib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from paceline.config.base import FILE_NAME
from paceline.config.shape import Shape
from paceline.config.toml import toml_value

_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    pathlib.Path: "path",
    datetime.datetime: "date and time",
    datetime.date: "date",
    datetime.time: "time",
    datetime.timedelta: "duration",
}
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "pattern": "matching {}",
}
_PATTERNS = {FILE_NAME: "of letters, digits, `_`, `-` and `.`, beginning with one of the first three"}
"""Those that have words of their own."""


def expected(shape: Shape) -> str:
    """`integer, at least 1, or "none"`."""
    words = [*(_scalar(scalar) for scalar in shape.scalars)]
    if shape.opaque:
        words.append("anything")
    if shape.item:
        words.append("list" if shape.item.opaque else f"list of {_grouped(shape.item)}")
    if shape.values:
        words.append("table" if shape.values.opaque else f"table of {_grouped(shape.values)}")
    if shape.sections:
        tags = " | ".join(toml_value(tag) for tag in shape.members)
        words.append(f"table with {shape.tag} = {tags}" if tags else "table")
    text = " | ".join(dict.fromkeys(words))
    for bound in shape.bounds:
        text = ", ".join([text, *_bound(bound, of_many=bool(shape.item or shape.values))])
    if shape.nullable and not shape.opaque:
        text += ', or "none"' if "," in text else ' or "none"'
    return text


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return found[0] if found else None


def _grouped(shape: Shape) -> str:
    words = expected(shape)
    return f"({words})" if "," in words or "|" in words else words


def _scalar(scalar: Any) -> str:
    if get_origin(scalar) is Literal:
        return " | ".join(toml_value(value) for value in get_args(scalar))
    if isinstance(scalar, type) and issubclass(scalar, enum.Enum):
        return " | ".join(toml_value(member.value) for member in scalar)
    return _NAMES.get(scalar) or str(getattr(scalar, "__name__", scalar))


def _bound(bound: Any, *, of_many: bool) -> list[str]:
    words = [
        _PATTERNS.get(limit) or phrase.format(f"{limit:g}" if isinstance(limit, float) else limit)
        for name, phrase in _BOUNDS.items()
        if (limit := getattr(bound, name, None)) is not None
    ]
    unit = "item" if of_many else "character"
    for name, phrase in (("min_length", "at least"), ("max_length", "at most")):
        limit = getattr(bound, name, None)
        if isinstance(limit, int):
            words.append(f"{phrase} {limit} {unit}{'' if limit == 1 else 's'}")
    return words
