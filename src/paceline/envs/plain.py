"""Plain functions of an environment (`def score`, not `async def score`) run where they hold up nobody.

| `blocking` | where a plain function runs |
| --- | --- |
| None (the default) | in a thread of the environment's own: one call at a time, in the order in which they were asked for |
| True | in threads, as many calls side by side as are asked for |
| False | on the event loop: for what is quick, or bound to the main thread |

The default is safe for whoever has not thought about it: state on `self` sees one call at a time, what one call opened
the next may use (an sqlite connection knows its thread), and a call that takes a minute costs this environment a
minute, and the run nothing. The hop costs some tens of microseconds a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

from paceline.envs.threads import daemon, perform, shared_threads
from paceline.errors import EnvError, said_by

P = ParamSpec("P")
T = TypeVar("T")

_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]

THREAD_NAME: Final = "paceline-plain"
_OURS: Final = f"{__name__.partition('.')[0]}."


class HasPlainFunctions(Protocol):
    """What an environment says of its plain functions."""

    @property
    def blocking(self) -> bool | None: ...

    @property
    def own_thread(self) -> OwnThread: ...


async def called(
    environment: HasPlainFunctions,
    function: Callable[..., Any],
    *args: Any,
    unclaimed: Callable[[Any], None] | None = None,
) -> Any:
    """What a function of the environment returns, whether it is async or plain. Raises what it raises.

    `unclaimed` is given, on the loop, what a thread returns when the caller has been cancelled meanwhile.
    """
    if runs_at_once(environment, function):
        result = function(*args)
    else:
        call = _Call(function, args, unclaimed)
        own_thread = None if environment.blocking else environment.own_thread
        try:
            result = await asyncio.get_running_loop().run_in_executor(own_thread or shared_threads(), call)
        except asyncio.CancelledError:
            if call.leave() and own_thread is not None:
                own_thread.leave_behind()
            raise
        except Exception as error:
            if _wants_the_loop(error):
                raise EnvError(
                    f"{said_by(error)}; a plain function runs in a thread: set `blocking = False` on the environment "
                    "if it is quick and has to run on the main thread"
                ) from error
            raise
    return await result if inspect.isawaitable(result) else result


def runs_at_once(environment: HasPlainFunctions, function: Callable[..., Any]) -> bool:
    """Whether it is called on the loop: it is async, said to be quick, or one of this package, whose functions are."""
    return (
        environment.blocking is False
        or inspect.iscoroutinefunction(function)
        or str(getattr(function, "__module__", "")).startswith(_OURS)
    )


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run a plain function in one of the threads that all environments of a process share."""
    return await asyncio.get_running_loop().run_in_executor(shared_threads(), function, *args)


class _Call:
    """A call in a thread, whose caller may go away."""

    __slots__ = ("_args", "_function", "_left", "_lock", "_loop", "_returned", "_runs", "_unclaimed")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], unclaimed: Callable[[Any], None] | None
    ) -> None:
        self._function = function
        self._args = args
        self._unclaimed = unclaimed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._runs = False
        self._returned: list[Any] = []

    def __call__(self) -> Any:
        with self._lock:
            if self._left.is_set():
                return None
            self._runs = True
        try:
            result = self._function(*self._args)
        finally:
            self._runs = False
        with self._lock:
            self._returned.append(result)
            is_left = self._left.is_set()
        if is_left:
            self._give_back()
        return result

    def leave(self) -> bool:
        """The caller has gone. Whether the call runs at this moment."""
        with self._lock:
            self._left.set()
            runs, has_returned = self._runs, bool(self._returned)
        if has_returned:
            self._give_back()
        return runs

    def _give_back(self) -> None:
        if self._unclaimed is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop is closed: what it could release has ended with it
                self._loop.call_soon_threadsafe(self._unclaimed, *self._returned)


class OwnThread(Executor):
    """One thread, made when it is needed, which ends with this object. Calls take their turns."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Put it in line."""
        future: Future[T] = Future()
        if self._work is None:
            self._work = self._begun()
        self._work.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def _begun(self) -> SimpleQueue[_Work | None]:
        work: SimpleQueue[_Work | None] = SimpleQueue()
        daemon(THREAD_NAME, _carry_out, work)
        weakref.finalize(self, work.put, None)
        return work

    def leave_behind(self) -> None:
        """Go on in a fresh thread: nobody waits any more for the call that this one is in, and nobody can interrupt it."""
        assert self._work is not None
        left, self._work = self._work, self._begun()
        with contextlib.suppress(Empty):
            while True:  # should that call just end, its thread takes some of them too: each is taken once
                self._work.put(left.get_nowait())
        left.put(None)


def _carry_out(work: SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        perform(*item)
        del item


def _wants_the_loop(error: Exception) -> bool:
    """Whether it fails because it runs in a thread: signals, event loops and some database handles are bound to theirs."""
    text = str(error)
    return any(
        said in text
        for said in ("main thread", "same thread", "no running event loop", "no current event loop")
    )
