"""Threads for the blocking code of environments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """A pool whose threads do not outlive their process.

    The interpreter waits at its end for the threads of the standard pool, however long they block: a tool that hangs
    would keep a run from stopping. These are made as they are needed, up to `most`, and are daemons.
    """

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
            self._work.put((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1  # spoken for
            elif self._threads < self._most:
                self._threads += 1
                name = f"{self._name}_{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work
            with self._lock:
                # With work in line it goes on with that, and is not free for what comes next.
                if self._work.empty():
                    self._idle += 1
