"""Where events wait for the core, and where rollouts wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from paceline.domain.commands import GrantTurn
from paceline.domain.events import Event, SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId


class Inbox:
    """Events in order, and one wake-up for any number of them."""

    __slots__ = ("_loop", "_scheduled", "_wake", "events")

    def __init__(self) -> None:
        """Call on a running loop."""
        self._loop = asyncio.get_running_loop()
        self._wake: Callable[[], None] | None = None
        self._scheduled = False
        self.events: deque[Event] = deque()

    def on_event(self, wake: Callable[[], None]) -> None:
        """`wake` runs on the loop, soon after an event was posted, once for all that are there by then."""
        self._wake = wake
        if self.events:
            self.reschedule()

    def post(self, event: Event) -> None:
        """Report something that happened. Handled in order, soon, on this loop."""
        self.events.append(event)
        if not self._scheduled:
            self.reschedule()

    def reschedule(self) -> None:
        """Wake although nothing new was posted: some events were left for the loop's next turn."""
        if not self._scheduled and self._wake is not None:
            self._scheduled = True
            self._loop.call_soon(self._fire)

    def _fire(self) -> None:
        self._scheduled = False
        if self._wake is not None:
            self._wake()


class Gates:
    """The turn gate of every rollout: implements `TurnGate` for the runner, opened by the driver."""

    __slots__ = ("_inbox", "_loop", "_waiting")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[RolloutId, asyncio.Future[GrantTurn]] = {}

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        """A rollout asks for a model call; the future is set when it may go ahead."""
        future: asyncio.Future[GrantTurn] = self._loop.create_future()
        self._waiting[event.rollout] = future
        self._inbox.post(event)
        return future

    def report(self, event: SegmentEnded) -> None:
        """The model call that was granted has ended."""
        self._inbox.post(event)

    def open(self, command: GrantTurn) -> None:
        """Let it through."""
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
