"""Plain functions of an environment (`def score`, not `async def score`) run where waiting in them holds up nobody.

| `blocking` | where a plain function runs |
| --- | --- |
| None (the default) | in a thread of the environment's own: one call at a time, in the order in which they were asked for |
| True | in threads, as many calls side by side as are asked for |
| False | on the event loop: for what is quick, or bound to the main thread |

The default is safe for whoever has not thought about it: state on `self` sees one call at a time, what one call opened
the next may use (an sqlite connection knows its thread), and a call that waits for a minute costs this environment a
minute, and the run nothing. Python runs one thread at a time all the same: what computes takes turns with the loop, and what
keeps the interpreter to itself (a regular expression that goes back and forth for seconds) belongs in a worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from types import FrameType
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeVar

from paceline.envs.threads import DaemonThreads, daemon, perform, shared_threads
from paceline.errors import EnvError, said_by

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

THREAD_NAME: Final = "paceline-plain"

GIVE_UP_S: Final = 5.0
"""Seconds that a call whose rollout has gone may take before those behind it go on without it, in a fresh thread."""

_OURS: Final = f"{__name__.partition('.')[0]}."


class HasPlainFunctions(Protocol):
    """What an environment says of its plain functions."""

    @property
    def blocking(self) -> bool | None: ...

    @property
    def own_thread(self) -> OwnThread: ...

    @property
    def chores(self) -> Chores: ...

    async def close(self) -> None: ...


async def called(
    environment: HasPlainFunctions,
    function: Callable[..., Any],
    *args: Any,
    unclaimed: Callable[[Any], Awaitable[None]] | None = None,
) -> Any:
    """What a function of the environment returns, whether it is async or plain. Raises what it raises.

    `unclaimed` is given what a thread returns when the caller has been cancelled meanwhile.
    """
    if runs_at_once(environment, function):
        result = function(*args)
        return await result if inspect.isawaitable(result) else result
    threads = shared_threads() if environment.blocking else environment.own_thread
    try:
        result = await _carried_out(
            threads, function, args, lambda running: environment.chores.add(_claimed(running, unclaimed))
        )
    except Exception as error:
        if _wants_the_loop(error):
            raise EnvError(
                f"{said_by(error)}; a plain function runs in a thread: set `blocking = False` on the environment "
                "if it is quick and has to run on the main thread"
            ) from error
        raise
    return await result if inspect.isawaitable(result) else result


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run a plain function in one of the threads that all environments of a process share."""
    result: T = await _carried_out(shared_threads(), function, args, _forget)
    return result


async def _carried_out(
    threads: DaemonThreads | OwnThread,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    when_left: Callable[[asyncio.Future[Any]], object],
) -> Any:
    """`when_left` is given the call that goes on when the caller is cancelled."""
    # Its own copy: what the function sets is its own, as it would be in a task.
    call = _Call(functools.partial(contextvars.copy_context().run, function, *args))
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(threads, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if call.leave():
            loop.call_later(GIVE_UP_S, threads.leave_behind, call)
            when_left(running)
        else:
            running.cancel()  # it had not begun, and will not
        raise


def _forget(running: asyncio.Future[Any]) -> None:
    """Nobody is there to hear of it."""
    running.add_done_callback(lambda done: done.cancelled() or done.exception())


def runs_at_once(environment: HasPlainFunctions, function: Callable[..., Any]) -> bool:
    """Whether it is called on the loop: it is async, said to be quick, or one of this package, whose functions are."""
    return (
        environment.blocking is False
        or inspect.iscoroutinefunction(function)
        or str(getattr(function, "__module__", "")).startswith(_OURS)
    )


async def _claimed(running: asyncio.Future[Any], unclaimed: Callable[[Any], Awaitable[None]] | None) -> None:
    try:
        result = await running
    except (Exception, SystemExit):  # of a rollout that has gone: nobody is there to hear of it
        return
    if unclaimed is not None:
        await unclaimed(result)


class Chores:
    """What is still to be done for rollouts that have ended: releases in line for their thread, results nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it in a task of its own, whatever becomes of the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def done(self, within_s: float) -> int:
        """Wait for all of it, for so many seconds at the most; how many were not."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while self._tasks and (left := until - loop.time()) > 0:
            # Not `gather`: one may bring another about.
            await asyncio.wait(set(self._tasks), timeout=left)
        return len(self._tasks)


class _Call:
    """A call in a thread, whose caller may go away."""

    __slots__ = ("_function", "_lock", "_state")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._state: Literal["waits", "left", "runs", "ended"] = "waits"

    @property
    def runs(self) -> bool:
        return self._state == "runs"

    def __call__(self) -> Any:
        with self._lock:
            if self._state == "left":
                return None
            self._state = "runs"
        try:
            return self._function()
        finally:
            self._state = "ended"

    def leave(self) -> bool:
        """The caller has gone. Whether the call has begun; if not, it never will."""
        with self._lock:
            if self._state == "waits":
                self._state = "left"
            return self._state != "left"


class OwnThread(Executor):
    """One thread, made when it is needed, which ends with this object. Calls take their turns."""

    def __init__(self) -> None:
        self._line: _Line | None = None
        self._ends: weakref.finalize[[], OwnThread] | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Put it in line."""
        line = self._line or self._begun()
        future: Future[T] = Future()
        line.add((future, functools.partial(fn, *args, **kwargs)))
        return future

    def leave_behind(self, call: _Call) -> None:
        """Go on in a fresh thread, if the call still runs: nobody waits for it, and nobody can interrupt it."""
        if not call.runs or self._line is None:
            return
        waiting, line = self._line.close(), self._begun()
        for item in waiting:
            line.add(item)

    def _begun(self) -> _Line:
        if self._ends is not None:
            self._ends.detach()
        line = self._line = _Line()
        self._ends = weakref.finalize(self, line.close)
        return line


async def close_after_chores(environment: HasPlainFunctions, within_s: float) -> None:
    """Close an environment once what it still has to do for rollouts that have ended is done, or `within_s` seconds later."""
    if left := await environment.chores.done(within_s):
        log.warning(
            "%s is closed with %d calls of ended rollouts left, releases perhaps: they took more than %g s",
            type(environment).__name__,
            left,
            within_s,
        )
    await environment.close()


class _Line:
    """Work for one thread."""

    def __init__(self) -> None:
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        daemon(THREAD_NAME, self._carry_out)

    def add(self, item: tuple[Future[Any], Callable[[], Any]]) -> None:
        with self._changed:
            self._work.append(item)
            self._changed.notify()

    def close(self) -> list[tuple[Future[Any], Callable[[], Any]]]:
        """Its thread ends after the call it is in, if it is in any. What it has not begun."""
        with self._changed:
            left = list(self._work)
            self._work.clear()
            self._is_closed = True
            self._changed.notify()
        return left

    def _carry_out(self) -> None:
        while (item := self._next()) is not None:
            perform(*item)
            del item

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._work and not self._is_closed:
                self._changed.wait()
            return self._work.popleft() if self._work else None


def plain_frames(frames: Mapping[int, FrameType]) -> list[FrameType]:
    """Of all threads' frames, those of threads that plain functions have for their own."""
    own = [thread.ident for thread in threading.enumerate() if thread.name == THREAD_NAME]
    return [frame for ident in own if ident is not None and (frame := frames.get(ident)) is not None]


def _wants_the_loop(error: Exception) -> bool:
    """Whether it fails because it runs in a thread: signals, event loops and some database handles are bound to theirs."""
    kind, text = type(error).__name__, str(error)
    return (
        (kind == "ValueError" and "only works in main thread" in text)
        or (kind == "RuntimeError" and ("no running event loop" in text or "no current event loop" in text))
        or (kind == "ProgrammingError" and "same thread" in text)
    )
