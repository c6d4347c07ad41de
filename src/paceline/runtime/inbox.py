"""Where events wait for the core, and where rollouts wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

from paceline.domain.commands import GrantTurn
from paceline.domain.events import Event, SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId

SHARE: Final = 0.75
"""Share of the loop's time that handling events at once may take; the rest waits for the loop's next turn."""


class Inbox:
    """Events in order, each handled at once where that holds nobody up.

    An event that finds the inbox empty is handled inside `post`: the turn that was asked for is granted, and the next
    rollout started, without another turn of the loop, which costs more than the decision does. A burst is not: many
    callbacks of one loop turn would each take their time, and sockets would wait for all of them. So `post` handles
    events only as long as it has taken less than `SHARE` of the time, give or take half a slice; what comes on top is
    left in line for one wake-up, which takes any number of them in slices.
    """

    __slots__ = ("_busy", "_handle", "_loop", "_owes_until", "_scheduled", "_slice_s", "events")

    def __init__(self) -> None:
        """Call on a running loop."""
        self._loop = asyncio.get_running_loop()
        self._handle: Callable[[Event], None] | None = None
        self._scheduled = False
        self._busy = False
        self._slice_s = 0.0
        self._owes_until = 0.0
        """When the time taken in `post` will have become `SHARE` of the time that passed."""
        self.events: deque[Event] = deque()

    def on_event(self, handle: Callable[[Event], None], slice_s: float) -> None:
        """`handle` takes one event: inside `post`, or on the loop soon after; never while it runs. When those that are
        in line have taken `slice_s` seconds, the rest waits for the loop's next turn."""
        self._handle = handle
        self._slice_s = slice_s
        if self.events:
            self._reschedule()

    def post(self, event: Event) -> None:
        """Report something that happened. Handled in order, at once or soon, on this loop."""
        if self._busy or self._scheduled or self._handle is None:
            self.events.append(event)  # whoever handles the others takes it along
            return
        began = perf_counter()
        owes_until = self._owes_until
        if owes_until - began > self._slice_s / 2:
            self.events.append(event)
            self._reschedule()
            return
        self._busy = True
        try:
            self._handle(event)
        finally:
            self._busy = False
        if self.events:  # what it has brought about
            self._drain(self._handle)
        self._owes_until = (owes_until if owes_until > began else began) + (perf_counter() - began) / SHARE

    def _reschedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        if self._handle is not None:
            self._drain(self._handle)

    def _drain(self, handle: Callable[[Event], None]) -> None:
        events = self.events
        self._busy = True
        try:
            until = perf_counter() + self._slice_s
            while events:
                handle(events.popleft())
                if perf_counter() > until and events:
                    self._reschedule()
                    return
        finally:
            self._busy = False


class Gates:
    """The turn gate of every rollout: implements `TurnGate` for the runner, opened by the driver."""

    __slots__ = ("_asks", "_granted", "_inbox", "_loop", "_waiting")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[RolloutId, asyncio.Future[GrantTurn]] = {}
        self._asks: RolloutId | None = None
        """Whose request is being handled."""
        self._granted: GrantTurn | None = None
        """The answer to it, if it came at once."""

    def request(self, event: TurnRequested) -> GrantTurn | asyncio.Future[GrantTurn]:
        """A rollout asks for a model call, and may go ahead at once, or when the future is set."""
        self._asks = event.rollout
        try:
            self._inbox.post(event)
        finally:
            self._asks = None
        if (granted := self._granted) is not None:
            self._granted = None
            return granted
        future: asyncio.Future[GrantTurn] = self._loop.create_future()
        self._waiting[event.rollout] = future
        return future

    def report(self, event: SegmentEnded) -> None:
        """The model call that was granted has ended."""
        self._inbox.post(event)

    def open(self, command: GrantTurn) -> None:
        """Let it through."""
        if command.rollout == self._asks:
            self._granted = command
            return
        future = self._waiting.pop(command.rollout, None)
        if future is not None and not future.done():
            future.set_result(command)
            return
        # The rollout ended at the gate (deadline, cancel) while its request was in the inbox. Its `RolloutEnded` may
        # be queued already, and must find the call answered: hence the front of the queue.
        self._inbox.events.appendleft(SegmentEnded(command.rollout, command.engine, (), "abort"))

    def forget(self, rollout: RolloutId) -> None:
        """The rollout has ended."""
        self._waiting.pop(rollout, None)
