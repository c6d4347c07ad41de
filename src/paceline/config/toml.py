"""Values and keys as TOML text, and a place in the config as people write it."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from paceline.config.shape import Path

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def toml_value(value: Any) -> str:
    """One line of TOML for a value made of TOML's own types."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return str(value)


def dotted(path: Path) -> str:
    """`env.0.weight`: how a place is named in messages and in provenance."""
    return ".".join(str(part) if isinstance(part, int) else toml_key(part) for part in path)


def header(path: Path) -> str:
    """`[orchestrator.sampling]`, or `[[env]] (env.0)` for a list's items: how a section is named."""
    if not path:
        return "the top level"
    names = toml_header(path)
    if not any(isinstance(part, int) for part in path):
        return f"[{names}]"
    brackets = f"[[{names}]]" if isinstance(path[-1], int) else f"[{names}]"
    return f"{brackets} ({dotted(path)})"


def toml_header(path: Path) -> str:
    """The name between the brackets of a table header, where indices are implied."""
    return ".".join(toml_key(part) for part in path if isinstance(part, str))


def as_flag(path: Path) -> str:
    """`--env.0.group-size`."""
    return "--" + ".".join(str(part).replace("_", "-") for part in path)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
