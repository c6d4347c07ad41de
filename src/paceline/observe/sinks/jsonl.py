"""`metrics.jsonl`: one JSON object a row, steps and evals. A number that is not finite is written as null."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.observe.rows import Row

FILE = "metrics.jsonl"


class JsonlSink:
    """Appends to a file, opened at the first row; after an error it is opened anew, so a disk may recover."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, row: Row) -> None:
        if row.kind == "now":
            return
        # Opened for every row: rows are seconds apart, and a reader always finds whole lines.
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row.flat()) + b"\n")

    def close(self) -> None:
        pass
