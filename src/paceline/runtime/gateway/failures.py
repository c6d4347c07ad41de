"""What a program is told when its request is not answered: OpenAI's form of errors, and Anthropic's."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from paceline.envs.protocol import RolloutTruncated
from paceline.errors import EngineError, EnvError, PacelineError

log = logging.getLogger(__name__)


class Refused(PacelineError):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        code: str | None = None,
        param: str | None = None,
        again: bool = False,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param
        self.again = again
        """Whether the same request may fare better later: clients are told, and do not try for nothing."""

    @property
    def kind(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "api_error"

    def openai(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


def refused(error: BaseException) -> Refused:
    """What a failed model call is to the program."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RolloutTruncated):
        code = "context_length_exceeded" if error.limit == "context" else "rollout_truncated"
        return Refused(400, str(error), code=code)
    if isinstance(error, asyncio.CancelledError):
        return Refused(503, "the rollout was stopped", code="rollout_stopped")
    if isinstance(error, EngineError):
        return Refused(500, str(error), code="engine_failed")
    if isinstance(error, EnvError):
        too_long = str(error).startswith("prompt too long")
        return Refused(400, str(error), code="context_length_exceeded" if too_long else None)
    # Ours to mend. The program hears of it in the form that it knows, and is not led to ask again, which would sample again.
    log.error("a call of a program failed", exc_info=error)
    return Refused(500, f"{type(error).__name__}: {error}", code="internal_error")
