"""What pydantic found wrong, told by file and line in the words of the config file."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from paceline.config.document import Document, Source
from paceline.config.flags import all_paths
from paceline.config.shape import Path, Shape, choices, keys_of
from paceline.config.toml import dotted, header, toml_value
from paceline.config.words import expected, nearest
from paceline.errors import without_password

_BOUND_TYPES = ("greater_than", "less_than", "multiple_of", "too_short", "too_long", "string_pattern")
_TYPE_SUFFIXES = ("_type", "_parsing", "_parsing_size", "_from_float")


class Problems:
    """Everything wrong with one config, each place told once, in the order of the files."""

    def __init__(self, document: Document, model: type[BaseModel], files: list[str]) -> None:
        self._document = document
        self._root = Shape(sections=(model,))
        self._somewhere = Source((-1, 0), ", ".join(files) or "config", "default")
        self._found: dict[tuple[Path, str], tuple[Source, str]] = {}
        self._plain: list[str] = []
        self._tree: Any = {}

    def add(self, text: str) -> None:
        """A problem whose text says its place itself."""
        self._plain.append(text)

    def refuse(self, path: Path, value: Any, shape: Shape, why: str = "") -> None:
        """A value that may not stand where it stands."""
        if any(at == path for at, _ in self._found):
            return
        hint = nearest(value, choices(shape)) if isinstance(value, str) else None
        text = f"{dotted(path)} = {_shown(value)}: expected {expected(shape)}"
        text += f" ({why})" if why else ""
        self._note(path, text + (f"; did you mean {toml_value(hint)}?" if hint else ""))

    def explain(self, error: ValidationError, tree: dict[str, Any]) -> None:
        """Take over what pydantic says of `tree`, the document as completed with defaults."""
        self._tree = tree
        for detail in error.errors(include_url=False):
            place = _locate(detail["loc"], tree, self._root)
            if place is not None:
                self._explain(detail, *place)

    def lines(self) -> list[str]:
        ordered = sorted(self._found.values(), key=lambda found: found[0])
        lines = [f"{source.where}: {text}" for source, text in ordered] + self._plain
        return [without_password(line) for line in lines]

    def _note(self, path: Path, text: str, source: Source | None = None) -> None:
        source = source or self._document.source_of(path) or self._somewhere
        self._found.setdefault((path, text), (source, text))

    def _explain(self, detail: ErrorDetails, path: Path, value: Any, shape: Shape, above: Shape) -> None:
        kind, message = detail["type"], detail["msg"]
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if kind == "extra_forbidden":
            self._unknown_key(path, above)
        elif kind == "missing":
            self._missing(path, shape)
        elif kind == "union_tag_not_found":
            tags = " or ".join(toml_value(tag) for tag in shape.members)
            self._note(path, f"{header(path)} does not say its {shape.tag}: expected {shape.tag} = {tags}")
        elif kind == "union_tag_invalid":
            tag = str(shape.tag)
            words = tuple(shape.members)
            given = value.get(tag) if isinstance(value, dict) else value
            hint = nearest(str(given), words)
            text = f"{dotted((*path, tag))} = {_shown(given)}: expected {' | '.join(map(toml_value, words))}"
            self._note((*path, tag), text + (f"; did you mean {toml_value(hint)}?" if hint else ""))
        elif kind == "too_short" and isinstance(value, list) and len(value) > detail["ctx"]["actual_length"]:
            pass  # pydantic counts the good items only; the bad ones are told by themselves
        elif kind in ("value_error", "assertion_error") or not _is_plain(kind):
            if shape.sections and isinstance(value, dict):
                self._contradiction(path, message)
            else:
                self._note(path, f"{dotted(path)} = {_shown(value)}: {message}")
        else:
            self.refuse(path, value, shape, _why(kind, message, shape))

    def _unknown_key(self, path: Path, above: Shape) -> None:
        name = str(path[-1])
        table = Document({"root": self._tree}).at(("root", *path[:-1]))
        chosen = above.section_of(table) if isinstance(table, dict) else None
        siblings = [key for model in ((chosen,) if chosen else above.sections) for key in keys_of(model)]
        other = [key for model in above.sections for key in keys_of(model)]
        text = f"unknown key '{dotted(path)}'"
        if name not in siblings and name in other:
            owner = next(tag for tag, model in above.members.items() if name in keys_of(model))
            text += f": it belongs to {above.tag} = {toml_value(owner)}"
        elif hint := nearest(name, siblings) or nearest(name.replace("-", "_"), siblings):
            text += f"; did you mean '{hint}'?"
        elif elsewhere := [at for at in all_paths(self._root.sections[0]) if at[-1] == name]:
            text += f"; did you mean '{dotted(elsewhere[0])}'?"
        elif siblings:
            text += f"; {header(path[:-1])} knows {', '.join(siblings)}"
        self._note(path, text)

    def _missing(self, path: Path, shape: Shape) -> None:
        if isinstance(path[-1], int):  # of a list of fixed length
            self._note(path[:-1], f"{dotted(path[:-1])} lacks item {path[-1]} ({expected(shape)})")
            return
        what = "section" if shape.sections and not shape.scalars else "key"
        text = f"{header(path[:-1])} lacks the required {what} '{path[-1]}' ({expected(shape)})"
        source = self._document.source_of(path[:-1]) if len(path) > 1 else self._somewhere
        if source is not None and source.is_flag and isinstance(path[-2], int):
            before = f"{path[-2]} before it" if path[-2] else "none before it"
            text += f": the flag makes a new item, with {before}, as they count from 0"
        self._note(path, text, source)

    def _contradiction(self, section: Path, message: str) -> None:
        """What a section's own check says, with where the values it speaks of were written, if they were."""
        sources = self._mentioned(section, message)
        places = "; ".join(f"{name} is set by {source.where}" for name, source in sources.items())
        text = f"{message} ({places})" if places else message
        if section:
            self._note(section, f"{header(section)}: {text}")
        else:
            self._note(section, text, max(sources.values(), default=self._somewhere))

    def _mentioned(self, section: Path, message: str) -> dict[str, Source]:
        found: dict[str, Source] = {}
        for at, source in self._document.sources.items():
            inner = at[len(section) :]
            if at[: len(section)] != section or not inner or isinstance(self._document.at(at), dict | list):
                continue
            if re.search(rf"(?<![\w.]){re.escape(dotted(inner))}(?!\w|\.\w)", message):
                found[dotted(inner)] = source
        return found


def _locate(loc: tuple[str | int, ...], tree: Any, root: Shape) -> tuple[Path, Any, Shape, Shape] | None:
    """Where in the file an error belongs: path, value, its shape and the shape around it.

    Pydantic's locations also name the union member it tried. None if that is not the one the file chose.
    """
    path: Path = ()
    value, shape, above, entered = tree, root, root, False
    for part in loc:
        if not entered and _alternatives(shape) > 1:
            entered = True
            chosen = shape.section_of(value) if isinstance(value, dict) else None
            if part in shape.members or (chosen is not None and part == chosen.__name__):
                continue
            if chosen is not None:
                return None
            if not isinstance(part, int) and not (isinstance(value, dict) and part in value):
                continue
        if isinstance(part, int) and not shape.item and not shape.opaque:
            continue
        if part == "[key]":
            continue
        above, entered = shape, False
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else PydanticUndefined
            shape = shape.item or Shape(opaque=True)
        else:
            chosen = shape.section_of(value) if isinstance(value, dict) else None
            known = {key: k for model in shape.sections for key, k in keys_of(model).items()}
            known |= keys_of(chosen) if chosen else {}
            value = value.get(part, PydanticUndefined) if isinstance(value, dict) else PydanticUndefined
            shape = known[part].shape if part in known else shape.values or Shape(opaque=True)
        path = (*path, part)
    return path, value, shape, above


def _alternatives(shape: Shape) -> int:
    return len(shape.sections) + len(shape.scalars) + bool(shape.item) + bool(shape.values)


def _is_plain(kind: str) -> bool:
    """Whether an error says no more than that the type or a bound is not met."""
    told = ("literal_error", "enum", "finite_number")
    return kind.endswith(_TYPE_SUFFIXES) or kind.startswith(_BOUND_TYPES) or kind in told


def _why(kind: str, message: str, shape: Shape) -> str:
    """Pydantic's own words, where ours do not say it."""
    if kind == "finite_number":
        return "a finite one"
    is_told = shape.bounds or not kind.startswith(_BOUND_TYPES)
    return "" if is_told and not shape.opaque else message


def _shown(value: Any) -> str:
    if value is None:
        return '"none"'
    text = toml_value(value)
    return text if len(text) <= 60 else text[:57] + "..."
