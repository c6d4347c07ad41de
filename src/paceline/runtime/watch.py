"""Notices a trainer that hangs, or that trains and never says so: a run must not wait for it for ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from paceline.errors import PacelineError, TrainerError


class TrainerWatch:
    """The trainer owes an acknowledgement for each batch, and weights for each step it acknowledged.

    While it owes something, each sign of life (an acknowledgement, a version) gives it `limit_s` more.
    """

    def __init__(self, limit_s: float, fail: Callable[[PacelineError], None], *, trained: int = 0) -> None:
        """`trained`: the step, and version, that the trainer goes on from. `fail` is told at most once."""
        self._limit_s, self._fail = limit_s, fail
        self._shipped = self._acknowledged = self._published = trained
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def shipped(self, step: int) -> None:
        if not self._owes():
            self._since = self._loop.time()
        self._shipped = max(self._shipped, step)
        self._arm()

    def acknowledged(self, step: int) -> None:
        self._acknowledged = max(self._acknowledged, step)
        self._sign_of_life()

    def published(self, version: int) -> None:
        self._published = max(self._published, version)
        self._sign_of_life()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _owes(self) -> bool:
        return self._shipped > self._acknowledged or self._acknowledged > self._published

    def _sign_of_life(self) -> None:
        self._since = self._loop.time()
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._owes() and math.isfinite(self._limit_s):
            self._timer = self._loop.call_at(self._since + self._limit_s, self._check)

    def _check(self) -> None:
        # One timer for all: a sign of life only moves `_since`, and the timer finds out when it fires.
        self._timer = None
        if not self._owes():
            return
        if self._loop.time() < self._since + self._limit_s:
            self._arm()
            return
        self._fail(TrainerError(self._reproach()))

    def _reproach(self) -> str:
        if self._shipped > self._acknowledged:
            return (
                f"batch {self._acknowledged + 1} was shipped and the trainer has not acknowledged it for "
                f"{self._limit_s:g} s: it was not started, hangs, or reads elsewhere; look at its log, or raise "
                "trainer.step_s"
            )
        return (
            f"the trainer acknowledged step {self._acknowledged}, but published no weights since "
            f"v{self._published} for {self._limit_s:g} s: publish each version whole, as weights/vNNNNNN with its "
            "version.json (paceline.publish_weights does), or raise trainer.step_s"
        )
