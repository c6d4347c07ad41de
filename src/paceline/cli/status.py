"""How a run stands or ended: RUN/status.json, and the exit code that agrees with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.errors import ConfigError, WireError, printable
from paceline.transport.status import RunStatus, Status, read_status, write_status

INTERRUPTED = 130
"""Exit code of a run that was stopped before it had saved; as a shell reports a process that SIGINT ended."""


class StatusFile:
    """Keeps RUN/status.json: `running` from construction on, then one final status, once.

    Use as a context manager around everything a run does, set-up and finalising included: an exception that
    passes through becomes the final status, and goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str = "",
        steps: int | None = None,
        trained: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`trained`: asked at the end for the steps that were taken."""
        self._run_dir, self._trained, self._clock = run_dir, trained, clock
        self._status = RunStatus(
            run_id=run_id,
            status="running",
            steps=steps,
            started=clock(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        write_status(run_dir, self._status)

    @property
    def status(self) -> RunStatus:
        return self._status

    def finish(self, status: Status, reason: str, *, code: int | None = None) -> int:
        """Set the final status, unless there is one: the first cause stands. Returns the exit code.

        `code`: where it is not the usual one of the status.
        """
        if self._status.exit_code is not None:
            return self._status.exit_code
        if code is None:
            code = 1 if status == "failed" else 0
        return self._finish(status, reason, code)

    def exits_with(self, code: int) -> int:
        """The run ended as its status says, but the process ends otherwise. Returns the exit code."""
        self._status = msgspec.structs.replace(self._status, exit_code=code)
        write_status(self._run_dir, self._status)
        return code

    def fail(self, error: BaseException) -> int:
        """Set the final status by what ended the run. Returns the exit code."""
        if self._status.exit_code is not None:
            return self._status.exit_code
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return self._finish("stopped", "interrupted", INTERRUPTED)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return self._finish("failed" if code else "stopped", f"exit with code {code}", code)
        return self._finish("failed", describe(error), 2 if isinstance(_first(error), ConfigError) else 1)

    def __enter__(self) -> StatusFile:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)
        elif self._status.exit_code is None:
            self.finish("failed", "the run ended without saying how")

    def _finish(self, status: Status, reason: str, code: int) -> int:
        # An environment's error is quoted in it, and half a surrogate pair of its text could not be written as UTF-8.
        self._status = msgspec.structs.replace(
            self._status,
            status=status,
            reason=printable(reason),
            trained=self._trained(),
            exit_code=code,
            ended=self._clock(),
        )
        # The cause is told all the same when the disk is gone that it should be written to.
        with contextlib.suppress(OSError):
            write_status(self._run_dir, self._status)
        return code


def how_it_stands(run_dir: Path) -> RunStatus:
    """The status of a run; one that was `running` in a process that is gone has failed. WireError if unreadable."""
    status = read_status(run_dir)
    if status is None:
        raise WireError(f"{run_dir} has no status.json: it is no run directory, or its run never started")
    if status.status == "running" and status.host == socket.gethostname() and not _is_alive(status.pid):
        return msgspec.structs.replace(
            status, status="failed", reason=f"its process {status.pid} is gone: it was killed", exit_code=137
        )
    return status


def describe(error: BaseException) -> str:
    """One line or a few: the first error of a group, by name unless it is ours, with its cause."""
    error = _first(error)
    text = str(error) or type(error).__name__
    ours = type(error).__module__.startswith("paceline.")
    told = text if ours or text == type(error).__name__ else f"{type(error).__name__}: {text}"
    cause = error.__cause__
    if cause is None or str(cause) in told:
        return told
    return f"{told} (because of {type(cause).__name__}: {cause})"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
