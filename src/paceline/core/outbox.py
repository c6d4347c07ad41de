"""What the parts of the core share while they decide on one event: its time, and the commands so far."""

from __future__ import annotations

from heapq import heappop, heappush

from paceline.domain.commands import Command, WakeAt


class Outbox:
    """Commands of the decision in hand, and the alarms that were asked for."""

    __slots__ = ("_alarms", "commands", "now", "say", "seq")

    def __init__(self) -> None:
        self._alarms: list[float] = []
        self.now = 0.0
        self.seq = -1
        """Number of the journal record that this decision will be: a shell records each decision, in order."""
        self.commands: list[Command] = []
        self.say = self.commands.append
        """`say(command)`: add a command."""

    def begin(self, now: float) -> list[Command]:
        """A new event, at `now`; returns the list that its commands will be in."""
        self.now = now
        self.seq += 1
        self.commands = []
        self.say = self.commands.append
        return self.commands

    @property
    def next_alarm(self) -> float | None:
        """When the next `TimerFired` is due; None when none was asked for."""
        return self._alarms[0] if self._alarms else None

    def wake_at(self, at: float, reason: str) -> None:
        """Ask for a `TimerFired`."""
        heappush(self._alarms, at)
        self.say(WakeAt(at, reason))

    def woken(self) -> None:
        """One has come; they come in order."""
        heappop(self._alarms)
