"""The config as written, before any type is checked: files and flags laid over each other, with sources."""

from __future__ import annotations

import pathlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.config.lines import key_lines
from paceline.config.shape import Path, Shape, keys_of
from paceline.errors import ConfigError


@dataclass(frozen=True, order=True)
class Source:
    """Where a value was written."""

    order: tuple[int, int]
    """Files as given, then flags; within one, by line or position. Errors are listed in this order."""
    where: str
    """For error messages: `run.toml:3`, or the flag itself."""
    provenance: str
    """For the record: `run.toml:3`, or `flag`."""

    @property
    def is_flag(self) -> bool:
        return self.provenance == "flag"


@dataclass
class Document:
    """A tree of TOML values, and the source of every place in it."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Path, Source] = field(default_factory=dict)

    def lay_over(self, upper: Document, shape: Shape) -> None:
        """Merge `upper` in: its values win, its lists replace, its tables merge."""
        self._merge(self.values, upper.values, (), shape, upper)

    def put(self, path: Path, value: Any, source: Source, shape: Shape, *, keeps_table: bool = False) -> None:
        """Set one value as a flag does, making the tables and list items on the way. `keeps_table`: an empty table only says
        that there is one."""
        holder: Any = self.values
        for depth, part in enumerate(path[:-1], start=1):
            wanted = list if isinstance(path[depth], int) else dict
            child = self.at(path[:depth])
            if not isinstance(child, wanted):
                self._forget(path[:depth])
                child = wanted()
                _set(holder, part, child)
            self.sources.setdefault(path[:depth], source)
            holder = child
        if isinstance(holder, dict):
            for name in _dropped(holder, {str(path[-1]): value}, shape_at(self.values, path[:-1], shape)):
                del holder[name]
                self._forget((*path[:-1], name))
        if keeps_table and value == {} and isinstance(self.at(path), dict):
            return
        self._forget(path)
        _set(holder, path[-1], value)
        self.sources[path] = source

    def at(self, path: Path) -> Any:
        """The value at `path`; None where there is none."""
        value: Any = self.values
        for part in path:
            if isinstance(part, int):
                value = value[part] if isinstance(value, list) and part < len(value) else None
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def source_of(self, path: Path) -> Source | None:
        """The source of a place, or of the first thing in it, or of the nearest thing around it."""
        if path in self.sources:
            return self.sources[path]
        if inside := [source for _, source in self._below(path)]:
            return min(inside)
        return self.source_of(path[:-1]) if path else None

    def _below(self, path: Path) -> Iterator[tuple[Path, Source]]:
        return ((at, s) for at, s in list(self.sources.items()) if at[: len(path)] == path)

    def _forget(self, path: Path) -> None:
        for at, _ in self._below(path):
            del self.sources[at]

    def _merge(
        self, lower: dict[str, Any], upper: dict[str, Any], at: Path, shape: Shape, other: Document
    ) -> None:
        for name in _dropped(lower, upper, shape):
            del lower[name]
            self._forget((*at, name))
        for name, value in upper.items():
            path = (*at, name)
            old = lower.get(name)
            if isinstance(value, dict) and isinstance(old, dict):
                if path in other.sources:
                    self.sources[path] = other.sources[path]
                self._merge(old, value, path, _below_key(shape, {**lower, **upper}, name), other)
            else:
                lower[name] = value
                self._forget(path)
                self.sources.update(other._below(path))


def read_file(file: pathlib.Path, number: int) -> Document:
    """A TOML file with the line of everything in it. ConfigError if it is not TOML, with the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_message(file, text, str(error))) from error
    sources = {
        path: Source((number, line), f"{file}:{line}", f"{file}:{line}")
        for path, line in key_lines(text).items()
    }
    return Document(values, sources)


def shape_at(values: Any, path: Path, shape: Shape) -> Shape:
    """The shape of a place, told with the help of the values written around it."""
    for part in path:
        shape = _below_key(shape, values, part)
        if isinstance(part, int):
            values = values[part] if isinstance(values, list) and part < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return shape


def _below_key(shape: Shape, table: Any, name: str | int) -> Shape:
    if isinstance(name, int):
        return shape.item or Shape(opaque=True)
    if shape.sections:
        table = table if isinstance(table, dict) else {}
        chosen = shape.section_of(table)
        for model in (chosen,) if chosen else shape.sections:
            if name in keys_of(model):
                return keys_of(model)[name].shape
    return shape.values or Shape(opaque=True)


def _set(holder: Any, part: str | int, value: Any) -> None:
    if isinstance(holder, list) and part == len(holder):
        holder.append(value)
    else:
        holder[part] = value


def _dropped(lower: dict[str, Any], upper: dict[str, Any], shape: Shape) -> list[str]:
    """Keys that lose their meaning because the upper layer chooses another member of a union.

    Those that the new member has too are kept: they were set on purpose.
    """
    if shape.tag is None or shape.tag not in upper or lower.get(shape.tag) == upper[shape.tag]:
        return []
    before, after = shape.section_of(lower), shape.section_of(upper)
    if after is None:
        return []
    foreign = {name for model in (before,) if model for name in keys_of(model)}
    if before is None and shape.tag not in lower:  # it meant the default member, whichever that is
        foreign = {name for model in shape.sections for name in keys_of(model)}
    return [name for name in lower if name in foreign and name not in keys_of(after)]


def _syntax_message(file: pathlib.Path, text: str, problem: str) -> str:
    found = re.search(r" \(at line (\d+), column (\d+)\)$", problem)
    if found is None:
        line = text.rstrip("\n").count("\n") + 1
        return f"{file}:{line}: not TOML: {problem}"
    return f"{file}:{found[1]}: not TOML: {problem[: found.start()]} (column {found[2]})"
