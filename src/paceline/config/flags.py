"""Overrides on the command line: `--orchestrator.batch-size 64 --env.0.weight=2 --no-shuffle --limit None`.

A flag names a place as the file does, with `-` for `_` if one likes, and says its value as plain text, read by
the type of the place; TOML and JSON work too where the type leaves it open. Lists of plain values take `1,2,3`. A table
takes the place of the one that is there, so that `{}` empties it. A switch needs no value, and `--no-` turns it off; the same
makes a section with its defaults, or none.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from paceline.config.document import Document, Source
from paceline.config.shape import Key, Path, Shape, choices, keys_of
from paceline.config.toml import as_flag, dotted
from paceline.config.words import expected, nearest

_SWITCH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class _Flag:
    spelled: str
    """As typed, without a value: `--orchestrator.batch-size`."""
    parts: tuple[str, ...]
    text: str | None
    """None where no value was given: a switch turned on, or off if `negated`."""
    negated: bool
    position: int


class _BadFlag(Exception):
    """A flag that cannot be followed; the message says why."""


def apply_flags(document: Document, model: type[BaseModel], tokens: Sequence[str]) -> list[str]:
    """Put every flag's value into `document`; later ones win. Returns what is wrong with the others."""
    root = Shape(sections=(model,))
    problems: list[str] = []
    flags = _parse(tokens, document, root, problems)
    # Choosing a union's member first makes the order of flags on the command line irrelevant to it.
    for flag in sorted(flags, key=lambda flag: not _chooses_member(flag, document, root)):
        source = Source((1_000_000, flag.position), f"flag {flag.spelled}", "flag")
        try:
            path, shape = _resolve(flag.parts, document, root)
            document.put(path, _value(flag, shape), source, root, keeps_table=flag.text is None)
        except _BadFlag as problem:
            problems.append(f"flag {flag.spelled}: {problem}")
    return problems


def takes_anything(model: type[BaseModel], key: str) -> bool:
    """Whether a place leaves the type open, so that a flag's text is read as TOML there: `args` of an environment."""
    try:
        return _resolve(tuple(key.split(".")), Document(), Shape(sections=(model,)), strict=False)[1].opaque
    except _BadFlag:
        return False


def all_paths(
    model: type[BaseModel], above: Path = (), seen: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[Path]:
    """Every place of a config that has a fixed name, list items under the index 0."""
    if model in seen:
        return
    for key in keys_of(model).values():
        path: Path = (*above, key.name)
        yield path
        shape = key.shape
        if not shape.sections and shape.item:
            path, shape = (*path, 0), shape.item
        for section in shape.sections:
            yield from all_paths(section, path, seen | {model})


def _parse(tokens: Sequence[str], document: Document, root: Shape, problems: list[str]) -> list[_Flag]:
    flags: list[_Flag] = []
    waiting = list(enumerate(tokens))
    while waiting:
        position, token = waiting.pop(0)
        if not token.startswith("--") or len(token) == 2:
            problems.append(f"unexpected argument {token!r}: an override looks like --section.key value")
            continue
        name, equals, text = token[2:].partition("=")
        following = waiting[0][1] if waiting and not waiting[0][1].startswith("--") else None
        flag = _Flag(f"--{name}", tuple(name.split(".")), text if equals else None, False, position)
        try:
            shape = _resolve(flag.parts, document, root, strict=False)[1]
            takes_next = (
                not _is_switch(shape)
                or (following or "").lower() in {*_SWITCH_WORDS, "none"}
                or (bool(shape.sections) and (following or "").startswith("{"))
            )
        except _BadFlag as problem:
            if name.startswith("no-") and not equals:
                parts = tuple(name.removeprefix("no-").split("."))
                try:
                    _resolve(parts, document, root, strict=False)
                    flags.append(_Flag(f"--{name}", parts, None, True, position))
                    continue
                except _BadFlag:
                    pass
            problems.append(f"flag --{name}: {problem}")
            if not equals and following is not None:
                waiting.pop(0)
            continue
        if not equals and takes_next and following is not None:
            waiting.pop(0)
            flag = _Flag(flag.spelled, flag.parts, following, False, position)
        flags.append(flag)
    return flags


def _resolve(
    parts: tuple[str, ...], document: Document, root: Shape, *, strict: bool = True
) -> tuple[Path, Shape]:
    """The place a flag names. `strict` also checks list indices, against the list as it is by then."""
    path: Path = ()
    shape = root
    for part in parts:
        table = document.at(path)
        if part.isdecimal() and (shape.item or (shape.opaque and isinstance(table, list))):
            size = len(table) if isinstance(table, list) else 0
            if strict and int(part) > size:
                raise _BadFlag(_beyond_the_end(path, size))
            path, shape = (*path, int(part)), shape.item or shape
            continue
        key = _key(part, shape, table)
        if key is not None:
            path, shape = (*path, key.name), key.shape
            if strict and document.at(path) is None and shape.item and not shape.sections:
                _start_from_default(document, path, key)
        elif shape.values or shape.opaque:
            known = table if isinstance(table, dict) else {}
            other = part.replace("-", "_")
            name = other if part not in known and other in known else part
            path, shape = (*path, name), shape.values or shape
        else:
            raise _BadFlag(_unknown(parts, part, path, shape, root))
    return path, shape


def _key(part: str, shape: Shape, table: Any) -> Key | None:
    chosen = shape.section_of(table if isinstance(table, dict) else {})
    # A flag for another member of the union is found too: it may be chosen by default, and if it is not,
    # the check of the whole says so.
    for model in ((chosen,) if chosen else ()) + shape.sections:
        for name in (part, part.replace("-", "_")):
            if name in keys_of(model):
                return keys_of(model)[name]
    return None


def _start_from_default(document: Document, path: Path, key: Key) -> None:
    """A flag into a list that no file gives changes the default list, rather than starting a new one."""
    default = key.default()
    if isinstance(default, list | tuple) and default:
        items = [as_table(item) if isinstance(item, BaseModel) else item for item in default]
        document.put(path, items, Source((-1, 0), "default", "default"), Shape(opaque=True))


def as_table(section: BaseModel) -> dict[str, Any]:
    """What one would have to write to get `section`: what was set in it, and the tag that chooses it."""
    keys = keys_of(type(section))
    said = {
        name: getattr(section, key.attribute)
        for name, key in keys.items()
        if key.attribute in section.model_fields_set or (not key.info.is_required() and _is_literal(key))
    }
    return {name: as_table(value) if isinstance(value, BaseModel) else value for name, value in said.items()}


def _is_literal(key: Key) -> bool:
    return len(choices(key.shape)) == 1


def _beyond_the_end(path: Path, size: int) -> str:
    following = as_flag((*path, size))
    if not size:
        return f"{dotted(path)} has no item yet, and items count from 0: {following} makes the first"
    names = " to ".join(dict.fromkeys(as_flag((*path, n)) for n in (0, size - 1)))
    items = "1 item" if size == 1 else f"{size} items"
    return f"{dotted(path)} has {items}, {names}, as they count from 0; {following} makes another"


def _unknown(parts: tuple[str, ...], part: str, path: Path, shape: Shape, root: Shape) -> str:
    if shape.item and not shape.sections:
        return f"{as_flag(path)} is a list, whose items go by number: {as_flag((*path, 0, *parts[len(path) + 1 :]))}"
    if not shape.sections and path:
        return f"{as_flag(path)} is a plain value ({expected(shape)}), with nothing inside"
    siblings = {as_flag((*path, name)) for model in shape.sections for name in keys_of(model)}
    everything = {as_flag(at) for model in root.sections for at in all_paths(model)}
    rest = parts[len(path) + 1 :]
    name = part.replace("_", "-")
    found = nearest(as_flag((*path, name)), siblings)
    if found and rest:
        found += "." + ".".join(rest)
    same_name = sorted(at for at in everything if at.rpartition(".")[2].removeprefix("--") == parts[-1])
    found = found or (same_name[0] if same_name else nearest(as_flag(parts), everything))
    return "unknown option" + (f"; did you mean {found}?" if found else "")


def _chooses_member(flag: _Flag, document: Document, root: Shape) -> bool:
    try:
        shape = _resolve(flag.parts[:-1], document, root, strict=False)[1]
    except _BadFlag:
        return False
    return shape.tag == flag.parts[-1]


def _is_switch(shape: Shape) -> bool:
    return shape.only_scalars(bool) or (bool(shape.sections) and not shape.scalars)


def _value(flag: _Flag, shape: Shape) -> Any:
    if flag.text is not None:
        return _read(flag.text, shape)
    if shape.only_scalars(bool):
        return not flag.negated
    if flag.negated:
        if shape.nullable:
            return None
        raise _BadFlag(f"cannot be switched off: it takes {expected(shape)}")
    if shape.sections or shape.values:
        return {}
    raise _BadFlag(f"needs a value: {expected(shape)}")


def _read(text: str, shape: Shape) -> Any:
    """A value from plain text. What does not fit is returned as text, for the type check to refuse."""
    if text in ("None", "none") and (shape.nullable or shape.opaque):
        return None
    if any(scalar is bool for scalar in shape.scalars) and text.lower() in _SWITCH_WORDS:
        return _SWITCH_WORDS[text.lower()]
    if any(scalar is int or _has_integers(scalar) for scalar in shape.scalars) and (
        number := _number(text, int)
    ):
        return number[0]
    if any(scalar in (int, float) for scalar in shape.scalars) and (number := _number(text, float)):
        return number[0]
    if shape.item and not shape.scalars and not text.startswith("["):
        return [_read(part.strip(), shape.item) for part in text.split(",") if part.strip()]
    if shape.opaque or shape.item or shape.values or shape.sections:
        try:
            return read_value(text)
        except ValueError as error:
            if text.startswith(("{", "[")) and not shape.opaque and str not in shape.scalars:
                raise _BadFlag(f"{text!r} is neither TOML, as {{ a = 1 }}, nor JSON: {error}") from None
            return text
    return text


def read_value(text: str) -> Any:
    """A value in the form of TOML, `{ a = 1 }`, or of JSON, `{"a": 1}`. ValueError if it is neither."""
    try:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _has_integers(scalar: Any) -> bool:
    return get_origin(scalar) is Literal and any(type(value) is int for value in get_args(scalar))


def _number(text: str, kind: Callable[[str], int | float]) -> tuple[int | float] | None:
    try:
        return (kind(text),)
    except ValueError:
        return None
