"""Where each key of a TOML document stands: dotted path -> line.

`tomllib` reports values without positions, and round-trip parsers cost more to import than everything else
here together. The text has already been accepted by `tomllib` when it comes here, so this scan only has to be
right about valid TOML; a property test compares it with `tomllib` on generated documents.
"""

from __future__ import annotations

import tomllib

from paceline.config.shape import Path


def key_lines(text: str) -> dict[Path, int]:
    """The 1-based line of every table, key and list item of a valid TOML document."""
    return _Scan(text).document()


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n") + "\n"
        self._at = 0
        self._line = 1
        self._lines: dict[Path, int] = {}
        self._tables_seen: dict[Path, int] = {}  # path of an array of tables -> tables so far

    def document(self) -> dict[Path, int]:
        table: Path = ()
        self._skip_blank()
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._key_value(table)
            self._skip_blank()
        return self._lines

    def _header(self) -> Path:
        is_array = self._text.startswith("[[", self._at)
        self._advance(2 if is_array else 1)
        line, keys = self._line, self._key()
        self._advance(2 if is_array else 1)
        path: Path = ()
        for depth, key in enumerate(keys, start=1):
            path = (*path, key)
            self._lines.setdefault(path, line)
            if is_array and depth == len(keys):
                self._tables_seen[path] = self._tables_seen.get(path, 0) + 1
            if path in self._tables_seen:
                # A header inside an array of tables means its latest table.
                path = (*path, self._tables_seen[path] - 1)
                self._lines.setdefault(path, line)
        if keys and not is_array:
            self._lines[path] = line  # [a] may come after [a.b], which only implied it
        return path

    def _key_value(self, table: Path) -> None:
        line = self._line
        path = table
        for key in self._key():
            path = (*path, key)
            self._lines.setdefault(path, line)
        self._advance(1)  # the equals sign
        self._skip_blank()
        self._value(path)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            self._skip_blank()
            start = self._at
            if self._text[start] in "\"'":
                self._string()
                parts.append(tomllib.loads(f"k = {self._text[start : self._at]}")["k"])
            else:
                while self._text[self._at] not in ".=] \t":
                    self._at += 1
                parts.append(self._text[start : self._at])
            self._skip_blank()
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _value(self, path: Path) -> None:
        opening = self._text[self._at]
        if opening in "\"'":
            self._string()
        elif opening == "[":
            self._items(path, "]")
        elif opening == "{":
            self._items(path, "}")
        else:
            while self._text[self._at] not in ",]}#\n":
                self._at += 1

    def _items(self, path: Path, closing: str) -> None:
        """The inside of an array or an inline table."""
        self._advance(1)
        index = 0
        self._skip_blank()
        while self._text[self._at] != closing:
            if closing == "}":
                self._key_value(path)
            else:
                self._lines[(*path, index)] = self._line
                self._value((*path, index))
            index += 1
            self._skip_blank()
            if self._text[self._at] == ",":
                self._at += 1
                self._skip_blank()
        self._at += 1

    def _string(self) -> None:
        quote = self._text[self._at]
        fence = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._advance(len(fence))
        while not self._text.startswith(fence, self._at):
            self._advance(2 if quote == '"' and self._text[self._at] == "\\" else 1)
        self._advance(len(fence))
        if len(fence) == 3:
            # Up to two more quotes belong to the end of a multi-line string's content.
            while self._text[self._at] == quote:
                self._at += 1

    def _skip_blank(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at] == "#":
                self._at = self._text.index("\n", self._at)
            elif self._text[self._at] in " \t\n":
                self._advance(1)
            else:
                return

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count
