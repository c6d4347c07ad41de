"""The processes a run starts beside itself: begun together, watched, and never left behind.

run ──starts──▶ engine, trainer …          each in a process group of its own, output in RUN/logs/NAME.log
run ◀──ready line (JSON, on stdout)──
run ◀──wait_dead() raises when one dies by itself, with its exit code and last words
run ──close(): SIGTERM, then SIGKILL, to the whole group
run dies, however ──▶ the group ends within seconds (parent.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from paceline.errors import EngineError, PacelineError
from paceline.runtime import parent

Ready = Literal["line"] | Callable[[], bool] | None
"""What says that a process is up: a JSON line `{"event": "ready", …}` on its stdout, a predicate (of a file that
appears, say), or nothing at all."""

_LINE_LIMIT = 2**20
_TAIL_LINES, _TAIL_BYTES = 15, 8192
_PREDICATE_EVERY_S = 0.1
_QUIET = {
    # Threads of several processes on shared cores spend their time at each other's barriers.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class ChildProcess:
    """One running process. Made by `start`; end it with `close`, or use it as an async context manager."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pipes: _Pipes,
        log: BinaryIO,
        log_path: Path,
        error: type[PacelineError],
        may_finish: bool,
    ) -> None:
        self.name, self.log_path = name, log_path
        self.ready: dict[str, Any] = {}
        """The ready line, where there was one."""
        self._process, self._pipes, self._log = process, pipes, log
        self._error, self._may_finish = error, may_finish
        self._closing = False
        self._is_gone = False
        """Whether its group has been ended: the number may be another's from then on."""
        self._said: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._copy_output(), name=f"{name}: output")
        self._end = asyncio.create_task(self._await_end(), name=f"{name}: end")

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        ready: Ready = "line",
        start_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        threads: int = 1,
        error: type[PacelineError] = EngineError,
        may_finish: bool = False,
        inherit: Sequence[int] = (),
    ) -> Self:
        """Start `argv` and wait until it is ready.

        Raises `error`, with exit code and last lines, when it ends or says nothing within `start_s`; nothing of
        it is left then. `env` is laid over this process's environment: what is secret goes there, since anyone
        can read arguments. `may_finish` says that ending by itself with code 0 is in order. `inherit` names file
        descriptors that it, and all it starts, hold open as long as they live.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab", buffering=0)
        quiet = {key: str(threads) if key.endswith("_THREADS") else value for key, value in _QUIET.items()}
        pipes = _Pipes()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent.__file__, *argv),
                stdin=pipes.child_stdin,
                stdout=pipes.child_stdout,
                stderr=log,
                env={**os.environ, **quiet, **(env or {})},
                start_new_session=True,
                pass_fds=tuple(inherit),
            )
        except BaseException:
            pipes.close()
            log.close()
            raise
        finally:
            pipes.close_child_ends()
        child = cls(name, process, pipes, log, log_path, error, may_finish)
        try:
            await child._until_ready(ready, start_s)
        except BaseException:
            await child.close(term_s=0.0)
            raise
        return child

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.returncode

    async def wait_dead(self) -> None:
        """Wait until it has ended. Raises the start's `error` unless it was closed, or finished as it may."""
        await asyncio.shield(self._end)
        if not self._closing and not (self._may_finish and self.exit_code == 0):
            raise self._error(self._obituary(f"{self.name} ended by itself"))

    async def close(self, term_s: float = 5.0, *, finish_s: float = 0.0) -> int:
        """Ask the process group to end, make it after `term_s`; returns the exit code. May be called twice.

        `finish_s` is how long it may take to end by itself first: for one that has been told elsewhere.
        """
        self._closing = True
        if finish_s > 0:
            await asyncio.wait((self._end,), timeout=finish_s)
        if self._process.returncode is None and term_s > 0:
            self._signal(signal.SIGTERM)
            await asyncio.wait((self._end,), timeout=term_s)
        self._signal(signal.SIGKILL)
        await asyncio.shield(self._end)
        return self._process.returncode if self._process.returncode is not None else -signal.SIGKILL

    def kill(self) -> None:
        """End the process group at once. Safe from another thread."""
        self._closing = True
        self._signal(signal.SIGKILL)

    def obituary(self) -> str:
        """How it ended, with its last words."""
        return self._obituary(f"{self.name} ended")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- inside

    async def _until_ready(self, ready: Ready, start_s: float) -> None:
        if ready is None:
            return
        waits: list[asyncio.Future[Any]] = [self._end]
        if ready == "line":
            waits.append(self._said)
            await asyncio.wait(waits, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
            if self._said.done():
                self.ready = self._said.result()
                return
        else:
            # What another program puts on disk wakes nobody here.
            loop = asyncio.get_running_loop()
            deadline = loop.time() + start_s
            while not self._end.done() and loop.time() < deadline:
                if ready():
                    return
                await asyncio.wait(waits, timeout=_PREDICATE_EVERY_S)
        if self._end.done():
            raise self._error(self._obituary(f"{self.name} ended before it was ready"))
        raise self._error(f"{self.name} was not ready within {start_s:g} s (start_s); {self._last_words()}")

    async def _copy_output(self) -> None:
        """Standard output into the log, and the ready line out of it."""
        stdout = await self._pipes.reader()
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # longer than the limit, and discarded
                line = b"(a line of more than 1 MiB)\n"
            if not line:
                return
            # A full disk under the log must not stop the reading: the program would block on its pipe.
            with contextlib.suppress(OSError):
                self._log.write(line)
            if not self._said.done() and line.startswith(b"{"):
                with contextlib.suppress(ValueError, RecursionError):
                    said = json.loads(line)
                    if said.get("event") == "ready":
                        self._said.set_result(said)

    async def _await_end(self) -> None:
        await self._process.wait()
        # Nothing it started outlives it. The keeper is still in the group, so the number cannot be another's.
        self._signal(signal.SIGKILL)
        self._is_gone = True
        await asyncio.wait((self._pump,), timeout=2.0)
        self._pump.cancel()
        self._pipes.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._is_gone:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _obituary(self, what: str) -> str:
        code = self.exit_code or 0
        with_code = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                with_code = f"signal {signal.Signals(-code).name}"
        return f"{what} ({with_code}); {self._last_words()}"

    def _last_words(self) -> str:
        lines = last_lines(self.log_path)
        said = "\n".join(f"  {line}" for line in lines)
        return (
            f"the last lines of {self.log_path}:\n{said}" if lines else f"it said nothing ({self.log_path})"
        )


class _Pipes:
    """Standard input and output of a process, held by us.

    asyncio's own pipes make its `wait` wait for their other ends too, which grandchildren and the keeper hold.
    """

    def __init__(self) -> None:
        self.child_stdin, self._lifeline = os.pipe()
        self._stdout, self.child_stdout = os.pipe()
        self._open = {self.child_stdin, self._lifeline, self._stdout, self.child_stdout}
        self._transport: asyncio.ReadTransport | None = None

    async def reader(self) -> asyncio.StreamReader:
        """What the process writes."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=_LINE_LIMIT, loop=loop)
        self._open.discard(self._stdout)
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream, loop=loop), os.fdopen(self._stdout, "rb", 0)
        )
        return stream

    def close_child_ends(self) -> None:
        """Once the process has them: else its end would never be seen."""
        self._close(self.child_stdin, self.child_stdout)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._close(*self._open)

    def _close(self, *ends: int) -> None:
        for end in ends:
            if end in self._open:
                self._open.discard(end)
                os.close(end)


def last_lines(path: Path, lines: int = _TAIL_LINES) -> list[str]:
    """The end of a log, for an error message; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
