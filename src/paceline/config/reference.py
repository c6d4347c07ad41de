"""Every option with its type, default and meaning, from the models alone.

One walk over the models feeds the option list of `--help` and the Markdown reference, so neither can drift;
the JSON schema is for editors (`#:schema paceline.schema.json` on top of a config file).
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from paceline.config.dump import plain
from paceline.config.shape import Key, Path, Shape, keys_of
from paceline.config.toml import as_flag, toml_key, toml_value
from paceline.config.words import expected


@dataclass(frozen=True)
class Option:
    """One key of a section."""

    name: str
    flag: str
    """`--env.N.weight`, where N is the number of the list item."""
    expects: str
    """Type, bounds and choices, in words."""
    default: str | None
    """As TOML; None where the key is required."""
    meaning: str


@dataclass(frozen=True)
class Group:
    """A section, or one member of a union of sections."""

    header: str
    """`[trainer]`, `[[env]]`, `[admission] type = "fixed"`; empty for the top level."""
    meaning: str
    options: tuple[Option, ...]


def groups(model: type[BaseModel]) -> tuple[Group, ...]:
    """All sections of a config, in the order they are declared."""
    return tuple(_groups(model, "", (), _doc(model), None, frozenset()))


_FLAGS = " On the command line a key is a flag: `--batch.seq-len 4096`, `--env.0.weight 2`; `--no-` before a switch turns it off."


def markdown(model: type[BaseModel], title: str = "Configuration", more: str = _FLAGS) -> str:
    """The reference as a Markdown document. The same models give the same bytes. `more` follows its first sentences."""
    lines = [f"# {title}", "", f'Every key, by section. `"none"` stands for no value.{more}']
    for group in groups(model):
        lines += ["", f"## `{group.header}`" if group.header else "## Top level"]
        if group.meaning:
            lines += ["", group.meaning]
        if group.options:
            lines += ["", "| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for option in group.options:
            default = f"`{option.default}`" if option.default is not None else "*required*"
            cells = (f"`{option.name}`", option.expects, default, option.meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def help_text(model: type[BaseModel], *, color: bool = False, width: int = 100) -> str:
    """The options as `--help` shows them; `color` for a terminal."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False)
    for group in groups(model):
        console.print()
        console.print(Text(group.header or "top level", style="bold"))
        if group.meaning:
            console.print(Padding(Text(group.meaning), (0, 0, 0, 2)))
        for option in group.options:
            line = Text(option.flag, style="cyan")
            line.append(f"  {option.expects}", style="green")
            default = "required" if option.default is None else f"default {option.default}"
            line.append(f"  [{default}]", style="bold red" if option.default is None else "dim")
            console.print(Padding(line, (0, 0, 0, 2)))
            if option.meaning:
                console.print(Padding(Text(option.meaning), (0, 0, 0, 6)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n")).lstrip("\n")


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of the config file, for editors; none is the word `"none"`, as in the file."""
    schema = _spell_none(model.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _groups(
    model: type[BaseModel],
    header: str,
    at: Path,
    meaning: str,
    default: Any,
    above: frozenset[type[BaseModel]],
) -> Iterator[Group]:
    default = default if isinstance(default, model) else None
    keys = list(keys_of(model).values())
    options = tuple(_option(key, at, default) for key in keys if not _is_section(key.shape))
    yield Group(header, meaning, options)
    for key in keys:
        shape, is_list, path = key.shape, False, (*at, key.name)
        if not shape.sections and shape.item:
            shape, is_list, path = shape.item, True, (*path, "N")
        elif not shape.sections and shape.values:
            shape, path = shape.values, (*path, "NAME")
        names = ".".join("NAME" if p == "NAME" else toml_key(str(p)) for p in path if p != "N")
        for section in shape.sections:
            if section in above:
                continue  # a section that holds itself is told once
            inner = f"[[{names}]]" if is_list else f"[{names}]"
            tags = [tag for tag, member in shape.members.items() if member is section]
            if tags and len(shape.sections) > 1:
                inner += f" {shape.tag} = {toml_value(tags[0])}"
            inside = _default(key, default)
            text = _section_doc(key, section, inside, is_one_of_many=len(shape.sections) > 1)
            yield from _groups(section, inner, path, text, inside, above | {model})


def _option(key: Key, at: Path, parent: BaseModel | None) -> Option:
    default = _default(key, parent)
    text = None if default is PydanticUndefined else toml_value(plain(default, key.shape))
    return Option(key.name, as_flag((*at, key.name)), expected(key.shape), text, _field_doc(key))


def _default(key: Key, parent: BaseModel | None) -> Any:
    return key.default() if parent is None else getattr(parent, key.attribute)


def _is_section(shape: Shape) -> bool:
    """Whether a key is told as a section of its own, and so not among the plain keys."""
    inner = shape.item or shape.values
    return bool(shape.sections or (inner and inner.sections)) and not shape.scalars


def _section_doc(key: Key, section: type[BaseModel], default: Any, *, is_one_of_many: bool) -> str:
    field, own = _field_doc(key), _doc(section)
    words = [own] if own.startswith(field.rstrip(".")) else [field, own]
    if is_one_of_many and isinstance(default, section):
        words.append("The default.")
    if key.shape.nullable:
        words.append("Left out by default." if default is None else 'May be "none".')
    return " ".join(word for word in words if word)


def _field_doc(key: Key) -> str:
    return " ".join((key.info.description or "").split())


def _doc(model: type[BaseModel]) -> str:
    return " ".join((inspect.cleandoc(model.__doc__) if model.__doc__ else "").split())


def _spell_none(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_spell_none(item) for item in schema]
    if not isinstance(schema, dict):
        return "none" if schema is None else schema
    if schema.get("type") == "null":
        return {"const": "none"}
    return {key: _spell_none(value) for key, value in schema.items()}
