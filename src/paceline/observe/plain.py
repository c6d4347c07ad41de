"""The view for a pipe: plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from paceline.domain.commands import Command, FinishRun, NoteDead, NoteOutage, NoteQuarantine
from paceline.domain.events import Event, RunOpened
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds
from paceline.observe.sinks.pump import Outbox
from paceline.observe.told import LINE, WHOLE, Elapsed, News, one_line, row_text, seconds_text


class PlainView:
    """One line for the start, every step, every eval, whatever went wrong, and the end."""

    def __init__(
        self,
        folds: RunFolds,
        stream: TextIO,
        *,
        max_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._max_steps = stream, max_steps
        self._time = Elapsed(folds, clock)
        self._news = News()
        self._broken = False
        # A pipe whose reader has stopped reading blocks whoever writes: let that be another thread.
        self._lines: Outbox[str] = Outbox("lines", self._print, lambda: None, size=4096)

    def decided(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if type(event) is RunOpened:
            self._time.opened(at)
        for text in self._news.of(at, event, commands):
            self._line(self._time.at(at), text)
        for command in commands:
            if type(command) is NoteDead:
                told = (
                    f"warning: {command.reason}"
                    if command.groups
                    else f"env {command.env!r}: {command.reason}"
                )
                self._line(self._time.at(at), told, whole=True)
            elif type(command) is NoteOutage:
                told = f"warning: {command.reason}" if command.out else command.reason
                self._line(self._time.at(at), told, whole=True)
            elif type(command) is NoteQuarantine:
                self._line(self._time.at(at), f"warning: {command.reason}", whole=True)
            elif type(command) is FinishRun:
                self._line(self._time.at(at), f"{command.status}: {command.reason}")

    def row(self, row: Row) -> None:
        self._line(self._time.at(row.at), row_text(row, self._max_steps))

    def phase(self, text: str) -> None:
        self._line(self._time.now(), text, whole=True)

    def close(self) -> None:
        self._lines.finish()
        self._lines.join(1.0)

    def _line(self, elapsed: float, text: str, whole: bool = False) -> None:
        told = one_line(text, longest=WHOLE if whole else LINE)
        self._lines.put(f"[{seconds_text(elapsed):>7}] {told}\n")

    def _print(self, line: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone; the run has not
            self._broken = True
