"""How a run ended: decided once, written once, and in agreement with the exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Self, TypeAlias

from paceline.errors import ConfigError, PacelineError

log = logging.getLogger(__name__)

FinalState: TypeAlias = Literal["done", "stopped", "failed"]


class FinalStatus:
    """Sets a run's final status, the first cause of its end, and knows the exit code.

    Use as a context manager around everything a run does, set-up and finalising included: what passes through as
    an exception becomes the final status, and goes on. `write` makes a status durable (RUN/status.json).
    """

    def __init__(self, write: Callable[[FinalState, str], None]) -> None:
        self._write = write
        self.state: FinalState | None = None
        """None while the run goes on."""
        self.reason = ""
        self.exit_code: int | None = None

    def finish(self, state: FinalState, reason: str) -> int:
        """The run has ended this way, unless it had ended before. Returns the exit code.

        Raises what `write` raises: a success that cannot be recorded is a failure.
        """
        return self._end(state, reason, 1 if state == "failed" else 0)

    def fail(self, error: BaseException) -> int:
        """The run was ended by `error`, unless it had ended before. Returns the exit code; never raises."""
        try:
            if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                return self._end("stopped", "interrupted", 0)
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
                return self._end("failed" if code else "stopped", f"exit with code {code}", code)
            return self._end("failed", describe(error), 2 if isinstance(_first(error), ConfigError) else 1)
        except (OSError, PacelineError) as unwritten:
            log.error("the final status could not be written: %s", unwritten)
            self.exit_code = self.exit_code or 1
            return self.exit_code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)
        elif self.state is None:
            self.finish("failed", "the run ended without saying how")

    def _end(self, state: FinalState, reason: str, code: int) -> int:
        if self.exit_code is not None:
            return self.exit_code
        self._write(state, reason)
        self.state, self.reason, self.exit_code = state, reason, code
        return code


def describe(error: BaseException) -> str:
    """One line or a few: the first error of a group, by name unless it is ours, with its cause."""
    error = _first(error)
    text = str(error) or type(error).__name__
    ours = isinstance(error, PacelineError)
    told = text if ours or text == type(error).__name__ else f"{type(error).__name__}: {text}"
    cause = error.__cause__
    if cause is None or str(cause) in told:
        return told
    return f"{told} (because of {type(cause).__name__}: {cause})"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
