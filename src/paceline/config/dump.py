"""The config as resolved, as TOML that reads back to an equal object and says where each value came from.

Every key is written, defaults and none too: the file alone repeats the run, also under a later version whose
defaults are others. How none is written: see `nothing`.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from paceline.config.nothing import word_for_none, write_text
from paceline.config.shape import Path, Shape, keys_of
from paceline.config.toml import dotted, toml_header, toml_key, toml_value


def dump(config: BaseModel, provenance: Mapping[str, str] | None = None) -> str:
    """TOML for `config`; with the provenance of `load`, as a comment behind each value."""
    lines = list(_section(config, (), provenance or {}))
    return "\n".join(lines).strip("\n") + "\n"


def _section(section: BaseModel, at: Path, provenance: Mapping[str, str]) -> Iterator[str]:
    keys = keys_of(type(section)).values()
    yield from _table(
        [(key.name, getattr(section, key.attribute), key.shape) for key in keys], at, provenance
    )


def _table(entries: list[tuple[str, Any, Shape]], at: Path, provenance: Mapping[str, str]) -> Iterator[str]:
    # Everything behind a header belongs to it, so what has no header of its own goes first.
    headed = [entry for entry in entries if _has_header(entry[1], entry[2])]
    for name, value, shape in entries:
        if (name, value, shape) not in headed:
            source = _source(dotted((*at, name)), provenance)
            comment = f"  # {source}" if source else ""
            yield f"{toml_key(name)} = {toml_value(plain(value, shape))}{comment}"
    for name, value, shape in headed:
        path: Path = (*at, name)
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from ("", f"[[{toml_header(path)}]]")
                yield from _section(item, (*path, index), provenance)
            continue
        yield from ("", f"[{toml_header(path)}]")
        if isinstance(value, BaseModel):
            yield from _section(value, path, provenance)
        else:
            inside = shape.values or Shape(opaque=True)
            yield from _table([(str(key), item, inside) for key, item in value.items()], path, provenance)


def _source(key: str, provenance: Mapping[str, str]) -> str | None:
    """The source of a value; of the first thing in it, where it is a table on one line."""
    if key in provenance:
        return provenance[key]
    return next((source for inner, source in provenance.items() if inner.startswith(f"{key}.")), None)


def _has_header(value: Any, shape: Shape) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, BaseModel) for item in value)
    return isinstance(value, BaseModel) or (isinstance(value, Mapping) and bool(value) and not shape.opaque)


def plain(value: Any, shape: Shape) -> Any:
    """A value in TOML's own types, ready for `toml_value`."""
    if value is None:
        return word_for_none(shape)
    if isinstance(value, enum.Enum):
        return plain(value.value, shape)
    if isinstance(value, str):
        return write_text(value, shape)
    if isinstance(value, BaseModel):
        keys = keys_of(type(value)).values()
        return {key.name: plain(getattr(value, key.attribute), key.shape) for key in keys}
    if isinstance(value, Mapping):
        inside = shape.values or Shape(opaque=True)
        return {str(key): plain(item, inside) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [plain(item, shape.item or Shape(opaque=True)) for item in value]
    if isinstance(value, bool | int | float | datetime.datetime | datetime.date | datetime.time):
        return value
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    text = to_jsonable_python(value, fallback=str)
    return write_text(text, shape) if isinstance(text, str) else text
