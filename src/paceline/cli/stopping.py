"""How a run is stopped: by signals, by an error, by code that has no business ending it, and in finite time.

signal ─▶ `Stopping` ─▶ the core drains, the trainer saves ─▶ if that takes too long: `CutOff` ends the process
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.cli.status import INTERRUPTED, StatusFile
from paceline.domain import events as on
from paceline.errors import EnvError, PacelineError, TrainerError, place_of, printable
from paceline.runtime.driver import Driver
from paceline.runtime.inbox import Inbox
from paceline.runtime.processes import ChildProcess

TERM_S = 1.0
"""Between asking a process to end and making it."""
_SAVE_S = 300.0
"""Seconds the trainer has to save when the run is done: every step has been trained by then."""
_FAILED_SAVE_S = 2.0
"""The same, when the run failed: people wait for the cause, and the batches since its last checkpoint are kept."""
SAME_SIGNAL_S = 0.1
"""A signal that comes again sooner is the same one: `timeout` sends its own to a process, and to the group it is in."""
_SIGNALLED_S = 2.0
"""A signal to all processes of a job reaches one after the other."""
_HARD_S = 1.5
"""What is left of a run this long after its time to stop is cut off, whatever it does."""
_GONE_S = 9.0
"""A run whose work stops in time is gone this long after it was asked to end."""
_REPORT_S = 0.5
"""Always left for the report: enough for a short run."""
_FAILED_S = 8.0
"""The same, after an error."""
_LEFT_S = 8.0
"""What an environment has left is cut off this long after the end of its run, which is saved by then."""


class Stopped(PacelineError):
    """Someone asked for the run to end before it had begun."""


class StoppedTwice(PacelineError):
    """Someone asked a second time for the run to end, or its work did not stop in time: now."""

    is_stop = True


class Stopping:
    """Who asked a run to end, and by when everything in it must have stopped."""

    def __init__(self, drain_s: float, envs: Sequence[str], cut_off: CutOff | None) -> None:
        """`drain_s`: seconds that work may take to stop when it is asked once. `envs` names the environments, whose
        code runs in this process. `cut_off` ends the process when all else fails; None where it is not the run's own.
        """
        self._drain_s = drain_s
        self._envs = ", ".join(dict.fromkeys(envs))
        self._cut_off = cut_off
        self._driver: Driver | None = None
        self._inbox: Inbox | None = None
        self._intrusion: EnvError | None = None
        self._stop_by = float("inf")  # on the loop's clock
        self._heard_at: float | None = None
        self._closing = False
        self.requests = 0
        """How often it was asked for."""
        self.hears = False
        """Whether signals reach our own handlers: what else interrupts or cancels the run is code that runs in it."""
        self._asked = asyncio.Event()
        self.hurry = asyncio.Event()
        """Set by the second request."""

    def drives(self, driver: Driver, inbox: Inbox) -> None:
        """The run is driven from now on: a request to stop is the core's to carry out."""
        self._driver, self._inbox = driver, inbox

    def closes(self) -> None:
        """Everything is being closed: there is nothing left that a request would have to interrupt."""
        self._closing = True

    def close(self) -> None:
        """The loop has ended: nothing is left to be cut off."""
        if self._cut_off is not None:
            self._cut_off.off()

    def save_s(self, done: bool) -> float:
        """Seconds the trainer may take to end by itself. `done`: the run came to its end."""
        if done:
            return _SAVE_S
        if not self.requests:
            return _FAILED_SAVE_S
        return max(0.0, self._stop_by - asyncio.get_running_loop().time() - TERM_S)

    # ── asked to ──

    async def watch_trainer(self, trainer: ChildProcess) -> None:
        """The end of the trainer is that of the run, but where both were asked: schedulers of clusters signal every process
        of a job, and the trainer may have saved and ended before the work of the run has stopped."""
        try:
            await trainer.wait_dead()
        except TrainerError:
            if trainer.exit_code != 0:
                raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _SIGNALLED_S)
            if not self.requests:
                raise

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C once drains and saves, twice stops at once; SIGTERM is the first of them."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone; whoever runs us in another looks after them
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        heard, at = 0, 0.0

        def hear(number: int, _frame: object) -> None:
            # Not in the loop: code of an environment may be holding that up, for ever even.
            nonlocal heard, at
            if heard and time.monotonic() - at < SAME_SIGNAL_S:
                return
            heard, at = heard + 1, time.monotonic()
            self._heard_at = self._heard_at or at
            self._cut_off_in(self._drain_s + _HARD_S if heard == 1 else TERM_S + _HARD_S)
            loop.call_soon_threadsafe(self._stop, names[signal.Signals(number)], task)

        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
        before = {number: signal.signal(number, hear) for number in names}
        self.hears = True
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, name: str, task: asyncio.Task[Any] | None) -> None:
        self.requests += 1
        self._asked.set()
        if self.requests > 1:
            self._abandon(f"{name} a second time", TERM_S + _HARD_S)
            return
        loop = asyncio.get_running_loop()
        self._stop_by = loop.time() + self._drain_s
        if self._inbox is not None:
            self._inbox.post(on.ShutdownRequested(name))
        elif task is not None and not self._closing:
            task.cancel()
        late = f"work did not stop within run.drain_s, {self._drain_s:g} s, after {name}"
        loop.call_later(self._drain_s, self._abandon, late, _HARD_S)

    def _abandon(self, why: str, within_s: float) -> None:
        self._cut_off_in(within_s)
        self.hurry.set()
        if self._driver is not None:
            self._driver.fail(StoppedTwice(why))

    def report_s(self) -> float | None:
        """Seconds that the report of a run which was asked to end may take: all is saved by then, and somebody waits. None
        when nobody asked."""
        if self._heard_at is None:
            return None
        return max(_REPORT_S, _GONE_S - (time.monotonic() - self._heard_at))

    # ── for another reason ──

    def failing(self, error: BaseException) -> None:
        """An error ends the run, and its work is still being stopped."""
        if not self.requests:
            if isinstance(error, asyncio.CancelledError):
                error = self.cancelled_by_code()
            self._cut_off_in(_FAILED_S, error)

    def cut_off_now(self, cause: BaseException) -> None:
        """Nothing else can end it: the loop does not run."""
        self._cut_off_in(0.0, cause)

    def cancelled_by_code(self) -> EnvError:
        """The cause, when nobody asked for the run's task to be cancelled."""
        return self.ended_by_code("the run's own task was cancelled")

    def ended_by_code(self, what: str) -> EnvError:
        """The cause, when code that runs in the loop ended the run; the first such cause stays it."""
        if self._intrusion is None:
            self._intrusion = EnvError(
                f"{what} by code that runs in this process, and the run cannot go on: environments ({self._envs}), "
                "algorithms and services may end and cancel what they started, and nothing else (no sys.exit, no "
                "asyncio.all_tasks())"
            )
        return self._intrusion

    def ended(self) -> None:
        """The run has come to its end, and everything of it is closed. Tasks that are left are somebody else's: they are
        cancelled, and what does not stop then is cut off."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left and self._cut_off is not None:
            names = ", ".join(sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in left))
            self._cut_off.what = (
                f"what environments ({self._envs}) or services have left in the loop ({names})"
            )
            self._cut_off.within(_LEFT_S)

    def _cut_off_in(self, seconds: float, cause: BaseException | None = None) -> None:
        if self._cut_off is not None:
            if cause is not None:
                self._cut_off.cause = cause
            self._cut_off.within(seconds)


class CutOff:
    """Ends this process when a run does not stop: a thread that hangs in somebody's code cannot be ended otherwise.

    What is on disk stays as it is, and a resumed run goes on from there.
    """

    def __init__(self, status: StatusFile, children: list[ChildProcess]) -> None:
        self._status, self._children = status, children
        self._timer: threading.Timer | None = None
        self.what = "something"
        """That does not stop."""
        self.cause: BaseException | None = None
        """What ended the run, when that is known and its work is still being stopped."""

    def within(self, seconds: float) -> None:
        """Not later than that; a later call sets a new time."""
        self.off()
        self._timer = threading.Timer(seconds, self._end, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, seconds: float) -> None:
        why = f"{self.what} did not stop within {seconds:g} s, and was cut off"
        if self.cause is not None:
            self._status.fail(self.cause)
        before = self._status.status
        code = self._status.finish("stopped", why, code=INTERRUPTED)
        if code == 0 and before.status != "done":  # it had ended, but for what does not stop
            code = self._status.exits_with(INTERRUPTED)
        for child in self._children:
            child.kill()
        told = f"{before.reason} ({why})" if before.reason else why
        print(f"{'error' if code else 'warning'}: {printable(told)}", file=sys.stderr, flush=True)
        os._exit(code)


def leave_with(code: int) -> None:
    """The process is about to end with this code, and does, whatever threads somebody's code has left: Python waits for all but
    daemons."""

    def end() -> None:
        left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        print(
            f"warning: threads that environments or services have left did not end within {_LEFT_S:g} s, and were cut off: "
            f"{printable(', '.join(left))}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    timer = threading.Timer(_LEFT_S, end)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def unstoppable(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Refuse `loop.stop()` to code that runs in it: it would end the run in the middle of everything, without a word."""

    def refuse() -> None:
        place = place_of(sys._getframe(1)) or "an unknown place"
        raise EnvError(
            f"loop.stop() at {place} is not for code that runs in the loop: the whole run is in it"
        )

    loop.stop = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loop.stop
