"""A bounded queue and one thread for every sink, so that monitoring cannot stop training.

The run's thread only appends to a deque. A sink that is slow loses its oldest rows; one that raises loses the row it
raised on; one that hangs fills its queue, loses the rest, and is abandoned at the end. All of it is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from paceline.observe.rows import Row

_log = logging.getLogger("paceline.observe")

T = TypeVar("T")


class Sink(Protocol):
    """Somewhere rows go. Called from a thread of its own, never from two at a time."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def write(self, row: Row) -> None:
        """Take one row. May raise anything; the row is lost then, and counted."""
        ...

    def close(self) -> None: ...


class SinkPump:
    """Hands rows to sinks without ever waiting for them.

    `queue` is the number of rows each sink may lag behind, `warn_s` the least time between two warnings about one.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        queue: int = 1024,
        warn_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._boxes = [
            Outbox(sink.name, sink.write, sink.close, size=queue, warn_s=warn_s, clock=clock)
            for sink in sinks
        ]

    @property
    def dropped(self) -> dict[str, int]:
        """Rows lost so far, by sink."""
        return {box.name: box.dropped for box in self._boxes}

    def put(self, row: Row) -> None:
        """Give a row to every sink. Takes microseconds, whatever the sinks do."""
        for box in self._boxes:
            box.put(row)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the sinks finish what is queued, for at most `timeout_s` together; count what was not written."""
        for box in self._boxes:
            box.finish()
        deadline = time.monotonic() + timeout_s
        for box in self._boxes:
            box.join(max(0.0, deadline - time.monotonic()))


class Outbox(Generic[T]):
    """One consumer: its queue, its thread, and what it lost."""

    def __init__(
        self,
        name: str,
        write: Callable[[T], None],
        close: Callable[[], None],
        *,
        size: int,
        warn_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.dropped = 0
        self._write, self._close = write, close
        self._size = size
        self._warn_s = warn_s
        self._clock = clock
        self._warned_at: float | None = None
        self._items: deque[T] = deque()
        self._wake = threading.Condition()
        self._finishing = False
        self._writing = False
        # A daemon: a consumer that hangs for ever must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue an item; the oldest goes when the queue is full."""
        with self._wake:
            if self._finishing:
                return
            if len(self._items) >= self._size:
                self._items.popleft()
                self._lose("is too slow")
            self._items.append(item)
            self._wake.notify()

    def finish(self) -> None:
        """Take nothing more; end once everything queued is written."""
        with self._wake:
            self._finishing = True
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, but not for ever: what is left then is lost."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return
        with self._wake:
            left = len(self._items) + self._writing
            self._items.clear()
            if left:
                self.dropped += left - 1
                self._lose("did not finish in time")

    def _work(self) -> None:
        while True:
            with self._wake:
                self._writing = False
                while not self._items and not self._finishing:
                    self._wake.wait()
                if not self._items:
                    break
                item = self._items.popleft()
                self._writing = True
            try:
                self._write(item)
            except Exception as error:  # whatever a consumer raises costs one item, and the run nothing
                with self._wake:
                    self._lose(f"failed: {type(error).__name__}: {error}")
        try:
            self._close()
        except Exception as error:
            _log.warning("metrics sink %s did not close: %s: %s", self.name, type(error).__name__, error)

    def _lose(self, why: str) -> None:
        self.dropped += 1
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= self._warn_s:
            self._warned_at = now
            _log.warning(
                "metrics sink %s %s; %d rows lost so far, the run goes on", self.name, why, self.dropped
            )
