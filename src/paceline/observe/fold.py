"""Folds: what can be learnt from a journal by walking it once, in order.

The same objects run live, called for every decision while it is taken, and over a journal file afterwards. A fold
names the events and commands it reads; the others cost it nothing. No fold needs a token array: counts come from
version runs, which a journal keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from paceline.domain.commands import Command
from paceline.domain.events import Event, RunOpened

Handler: TypeAlias = Callable[[float, Any], None]
"""Takes the time of the decision, in seconds of the run's clock, and one event or command."""


class Decision(Protocol):
    """One line of a journal."""

    @property
    def at(self) -> float: ...

    @property
    def event(self) -> Event: ...

    @property
    def commands(self) -> Sequence[Command]: ...


class Fold:
    """Reads decisions in order. Subclasses say in `handlers` what they read; nothing else reaches them."""

    def handlers(self) -> Mapping[type, Handler]:
        raise NotImplementedError

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """Take in one decision: the event, then the commands it caused."""
        table = self.__dict__.get("_table")
        if table is None:
            table = self.__dict__["_table"] = dict(self.handlers())
        for fact in (event, *commands):
            if handler := table.get(type(fact)):
                handler(at, fact)


class Folds:
    """Several folds behind one `apply`. A fold that reads another's state must come after it.

    Folds are given the run's time: where a process that resumes starts its clock at nought, its first moment here
    is the last one of the process before.
    """

    def __init__(self, folds: Iterable[Fold]) -> None:
        table: dict[type, tuple[Handler, ...]] = {}
        for fold in folds:
            for kind, handler in fold.handlers().items():
                table[kind] = (*table.get(kind, ()), handler)
        self._table = table
        self.now = 0.0
        """The run's time at the latest decision."""
        self._before = 0.0
        """Seconds of the run that went by before this process."""

    def apply(self, at: float, event: Event, commands: Sequence[Command] = ()) -> float:
        """Take in one decision; returns the run's time. Costs a dictionary look-up for what no fold reads."""
        if type(event) is RunOpened:
            self._before = max(0.0, self.now - at)
        table = self._table
        at = self.now = at + self._before
        for handler in table.get(type(event), ()):
            handler(at, event)
        for command in commands:
            for handler in table.get(type(command), ()):
                handler(at, command)
        return at

    def read(self, decisions: Iterable[Decision]) -> None:
        """Take in a whole journal."""
        apply = self.apply
        for decision in decisions:
            apply(decision.at, decision.event, decision.commands)
