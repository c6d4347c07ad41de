"""From TOML files and command-line overrides to one checked, frozen config, with the source of every value.

    files ──read, merged──┐
                          ├─► Document ──completed──► pydantic ──► Loaded(value, provenance)
    flags ────────────────┘        └──────── Problems ◄──┘        or one ConfigError with all that is wrong

The rules of merging: a later file wins, tables merge, lists are replaced; choosing another member of a union
drops the keys that only the old one had. A table in the file is laid over the default of its section, so that
writing one key never changes the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from paceline.config.document import Document, read_file
from paceline.config.flags import apply_flags
from paceline.config.nothing import read_text
from paceline.config.problems import Problems
from paceline.config.shape import Path, Shape, keys_of
from paceline.config.toml import dotted
from paceline.errors import ConfigError

T = TypeVar("T", bound=BaseModel)

_LEAST, _MOST = -(2**63), 2**63 - 1
"""TOML's integers, and the journal's: it could not be read again with a larger one in it."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config, and where each value in it comes from."""

    value: T
    provenance: Mapping[str, str]
    """Dotted key of every leaf (`env.0.weight`) -> `file:line`, `flag` or `default`."""


def load(model_cls: type[T], files: Sequence[FilePath], overrides: Sequence[str] = ()) -> Loaded[T]:
    """The config that `files`, merged in order, and `overrides` (`--a.b-c 3`, see `flags`) describe.

    One ConfigError names everything that is wrong, each with its file and line or its flag.
    """
    root = Shape(sections=(model_cls,))
    document = Document()
    unreadable: list[str] = []
    for number, file in enumerate(files):
        try:
            document.lay_over(read_file(file, number), root)
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:
        raise _failure(unreadable)
    problems = Problems(document, model_cls, [str(file) for file in files])
    for problem in apply_flags(document, model_cls, overrides):
        problems.add(problem)
    tree = _complete(document.values, root, None, (), problems)
    try:
        value = model_cls.model_validate(tree)
    except ValidationError as error:
        problems.explain(error, tree)
    if lines := problems.lines():
        raise _failure(lines)
    return Loaded(value, _provenance(value, document))


def leaves(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every leaf of a config: plain values, lists of them, and whatever is empty."""
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, key.attribute) for name, key in keys_of(type(value)).items()}
    elif isinstance(value, Mapping):
        inner = {str(name): item for name, item in value.items()}
    elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*at, index))
        return
    else:
        inner = {}
    if not inner:
        yield at
    for name, item in inner.items():
        yield from leaves(item, (*at, name))


def _provenance(value: BaseModel, document: Document) -> dict[str, str]:
    sources = document.sources
    found: dict[str, str] = {}
    for path in leaves(value):
        source = sources.get(path)
        for depth in range(len(path) - 1, 0, -1):
            if source is None and not isinstance(document.at(path[:depth]), dict | list):
                # Made by a validator from the plain value that stood above it, if any did.
                source = sources.get(path[:depth])
        found[dotted(path)] = source.provenance if source else "default"
    return found


def _complete(value: Any, shape: Shape, default: Any, at: Path, problems: Problems) -> Any:
    """The value as pydantic shall see it: none where it is meant, and over the default of its section."""
    if isinstance(value, str) and (value := read_text(value, shape)) is None:
        return None
    if isinstance(value, list):
        item = shape.item or Shape(opaque=True)
        return [_complete(inner, item, None, (*at, n), problems) for n, inner in enumerate(value)]
    if isinstance(value, dict):
        if shape.sections:
            return _complete_section(value, shape, default, at, problems)
        inside = shape.values or Shape(opaque=True)
        return {key: _complete(inner, inside, None, (*at, key), problems) for key, inner in value.items()}
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        problems.refuse(at, value, shape, f"integers go from {_LEAST} to {_MOST}")
    elif not shape.converts and _is_loose(value, shape):
        problems.refuse(at, value, shape)
    return value


def _complete_section(
    table: dict[str, Any], shape: Shape, default: Any, at: Path, problems: Problems
) -> dict[str, Any]:
    base = default if isinstance(default, shape.sections) else None
    if base is not None and shape.tag is not None and shape.tag not in table:
        table = {shape.tag: getattr(base, shape.tag), **table}
    section = shape.section_of(table)
    if section is None:
        return table
    keys = keys_of(section)
    whole: dict[str, Any] = {}
    if type(base) is section:
        said = {name: key for name, key in keys.items() if key.attribute in base.model_fields_set}
        whole = {name: getattr(base, key.attribute) for name, key in said.items()}
    else:
        base = None
    for name, value in table.items():
        if key := keys.get(name):
            inner = getattr(base, key.attribute) if base is not None else key.default()
            value = _complete(value, key.shape, inner, (*at, name), problems)
        whole[name] = value
    return whole


def _is_loose(value: Any, shape: Shape) -> bool:
    """Whether pydantic would take a value that TOML wrote as something else: `"64"` or true for 64, 1 for true."""
    if isinstance(value, bool):
        return shape.only_scalars(int, float)
    if isinstance(value, int | float):
        return shape.only_scalars(bool)
    return isinstance(value, str) and shape.only_scalars(int, float, bool)


def _failure(lines: list[str]) -> ConfigError:
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n  ".join([f"{len(lines)} things are wrong in the configuration:", *lines]))
