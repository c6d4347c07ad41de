"""Threads for the blocking code of environments. None outlives its process.

The interpreter waits at its end for the threads of the standard pool, however long they block: a tool that hangs would keep
a run from stopping. These are daemons.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HasRun(Protocol):
    """A call in a thread."""

    @property
    def runs(self) -> bool: ...


class DaemonThreads(Executor):
    """A pool whose threads are made as they are needed, up to `most`."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it in a thread, at once or when one is free."""
        future: Future[T] = Future()
        with self._lock:
            self._work.put((future, functools.partial(fn, *args, **kwargs)))
            if self._idle:
                self._idle -= 1  # spoken for
            elif self._threads < self._most:
                self._threads += 1
                daemon(f"{self._name}_{self._threads}", self._run)
        return future

    def leave_behind(self, call: HasRun) -> None:
        """Have one thread more, if the call still runs: nobody waits for it, and nobody can interrupt it."""
        with self._lock:
            if not call.runs:
                return
            self._most += 1
            if not self._work.empty() and self._threads < self._most:
                self._threads += 1
                daemon(f"{self._name}_{self._threads}", self._run)

    def _run(self) -> None:
        while True:
            perform(*self._work.get())
            with self._lock:
                # With work in line it goes on with that, and is not free for what comes next.
                if self._work.empty():
                    self._idle += 1


@functools.cache
def shared_threads() -> DaemonThreads:
    """Those of all environments of a process. Asyncio's own pool has a thread or two more than there are cores: blocking
    tools, which mostly wait, would stand in line for them."""
    return DaemonThreads(256, "paceline-env")


def daemon(name: str, run: Callable[..., None], *args: Any) -> None:
    """Start a thread that its process does not wait for."""
    threading.Thread(target=run, args=args, name=name, daemon=True).start()


def perform(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do what was asked for, unless nobody waits for it any more, and say how it went."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except (StopIteration, GeneratorExit, KeyboardInterrupt) as error:
        # The first no future of asyncio can hold: whoever waits for it would wait for ever. The others mean something else to
        # whoever waits: nobody's Ctrl-C is heard in a thread.
        why = RuntimeError(f"a plain function raised {type(error).__name__}: {error}")
        why.__cause__ = error
        future.set_exception(why)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
