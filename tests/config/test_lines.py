"""The line of every key, compared with what `tomllib` reads on generated documents."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.lines import key_lines
from paceline.config.shape import Path
from paceline.config.toml import toml_key, toml_value

KEYS = st.one_of(st.sampled_from(["a", "b", "c-d", "e_f", "1"]), st.text("x.\"'#=[] é\n\\", max_size=4))
SCALARS = st.one_of(
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text("ab #=[]{},'\"\\\n\t", max_size=8),
    st.datetimes(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


def paths(value: Any, at: Path = ()) -> set[Path]:
    found = {at} if at else set()
    if isinstance(value, dict):
        return found.union(*(paths(item, (*at, key)) for key, item in value.items()))
    if isinstance(value, list):
        return found.union(*(paths(item, (*at, n)) for n, item in enumerate(value)))
    return found


class Writer:
    """Writes a document in any of the ways TOML allows, and notes the line of each plain value."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[Path, int] = {}

    def blank(self, breaks: bool) -> None:
        choices = ["", " ", "\t"] + (["\n", "\n # [x] = \"{' \n", "\r\n"] if breaks else [])
        self.text += self.draw(st.sampled_from(choices))

    def value(self, value: Any, at: Path, breaks: bool = True) -> None:
        self.lines[at] = self.text.count("\n") + 1
        if isinstance(value, list):
            self.text += "["
            for n, item in enumerate(value):
                self.blank(breaks)
                self.value(item, (*at, n), breaks)
                self.blank(breaks)
                self.text += "," if n < len(value) - 1 or self.draw(st.booleans()) else ""
                self.blank(breaks)
            self.text += "]"
        elif isinstance(value, dict):
            self.text += "{"
            for n, (key, item) in enumerate(value.items()):
                self.text += ", " if n else ""
                self.lines[(*at, key)] = self.text.count("\n") + 1
                self.text += f"{toml_key(key)} = "
                self.value(item, (*at, key), breaks=False)
            self.text += "}"
        elif isinstance(value, str) and "\\" not in value and "'''" not in value and breaks:
            fence = self.draw(st.sampled_from(["'''", '"""', ""]))
            plain = fence == "'''" and not value.endswith("'")
            escaped = fence == '"""' and '"' not in value
            if plain or escaped:
                self.text += f"{fence}\n{value}{fence}"
            else:
                self.text += toml_value(value)
        else:
            self.text += toml_value(value)

    def table(self, table: dict[str, Any], at: Path, header: str) -> None:
        later: list[tuple[str, Any]] = []
        for key, value in table.items():
            is_tables = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            if (isinstance(value, dict) or is_tables) and self.draw(st.booleans()):
                later.append((key, value))
                continue
            self.blank(True)
            self.lines[(*at, key)] = self.text.count("\n") + 1
            self.text += f"{toml_key(key)} ="
            self.blank(False)
            self.value(value, (*at, key))
            self.text += self.draw(st.sampled_from(["\n", " # c\n", "\r\n"]))
        for key, value in later:
            name = f"{header}.{toml_key(key)}".lstrip(".")
            if isinstance(value, dict):
                self.lines[(*at, key)] = self.text.count("\n") + 1
                self.text += f"[{name}]\n"
                self.table(value, (*at, key), name)
                continue
            self.lines[(*at, key)] = self.text.count("\n") + 1
            for n, item in enumerate(value):
                self.lines[(*at, key, n)] = self.text.count("\n") + 1
                self.text += f"[[ {name} ]]\n"
                self.table(item, (*at, key, n), name)


@st.composite
def documents(draw: st.DrawFn) -> Writer:
    writer = Writer(draw)
    writer.table(draw(st.dictionaries(KEYS, VALUES, max_size=5)), (), "")
    return writer


@settings(deadline=None)
@given(documents())
def test_every_table_key_and_item_is_found_on_its_line(document: Writer) -> None:
    found = key_lines(document.text)
    assert set(found) == paths(tomllib.loads(document.text))
    assert found == document.lines


def test_dotted_keys_and_headers_in_any_order_are_found() -> None:
    text = """a.b . "c.d" = 1
a.e = 2
[x.y]
k = '''one
two''''' # a quote more than the fence
l = "\\\\\\""
[[z]]
[z.w]
[[z.w.v]]
q = { r.s = 1, t = [ { u = 2 } ] }
[[z]]
p = 1979-05-27 07:32:00
[x]
m = []
"""
    assert set(key_lines(text)) == paths(tomllib.loads(text))
    assert key_lines(text) == {
        ("a",): 1,
        ("a", "b"): 1,
        ("a", "b", "c.d"): 1,
        ("a", "e"): 2,
        ("x",): 13,
        ("x", "y"): 3,
        ("x", "y", "k"): 4,
        ("x", "y", "l"): 6,
        ("z",): 7,
        ("z", 0): 7,
        ("z", 0, "w"): 8,
        ("z", 0, "w", "v"): 9,
        ("z", 0, "w", "v", 0): 9,
        ("z", 0, "w", "v", 0, "q"): 10,
        ("z", 0, "w", "v", 0, "q", "r"): 10,
        ("z", 0, "w", "v", 0, "q", "r", "s"): 10,
        ("z", 0, "w", "v", 0, "q", "t"): 10,
        ("z", 0, "w", "v", 0, "q", "t", 0): 10,
        ("z", 0, "w", "v", 0, "q", "t", 0, "u"): 10,
        ("z", 1): 11,
        ("z", 1, "p"): 12,
        ("x", "m"): 14,
    }
