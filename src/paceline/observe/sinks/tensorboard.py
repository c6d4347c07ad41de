"""TensorBoard event files, by tensorboardX. An eval's points lie at the version it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.rows import Row


class TensorboardSink:
    """One folder of event files; a resumption adds a file to it."""

    name = "tensorboard"

    def __init__(self, path: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(path))

    def write(self, row: Row) -> None:
        if row.kind == "now":
            return
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
