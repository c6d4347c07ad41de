"""Notices that a run waits for a trainer that nobody has started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.domain.commands import Command
from paceline.domain.events import BatchShipped, Event, StepTrained

_PATIENCE_S = 2.0
"""A small model's trainer has made a step by then; that a large one is being waited for is true as well."""


class TrainerAwaited:
    """Says once that a batch lies there and no step has been acknowledged, some seconds after it was shipped."""

    def __init__(self, say: Callable[[], None], patience_s: float = _PATIENCE_S) -> None:
        self._say, self._patience_s = say, patience_s
        self._shipped_at: float | None = None
        self._done = False

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """Take in one decision."""
        if self._done:
            return
        if type(event) is StepTrained:
            self._done = True
        elif self._shipped_at is None:
            if type(event) is BatchShipped:
                self._shipped_at = at
        elif at >= self._shipped_at + self._patience_s:
            self._done = True
            self._say()
