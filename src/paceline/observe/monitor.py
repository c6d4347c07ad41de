"""Monitor: what a live run tells about itself. One object for the driver to call, for every decision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from paceline.domain.commands import Command
from paceline.domain.events import Event, LoadReported
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineLoad
from paceline.observe.rows import Row
from paceline.observe.run import RunFolds, trained_steps
from paceline.observe.sinks.pump import SinkPump

_log = logging.getLogger("paceline.observe")

_NOW_S = 1.0  # seconds between rows of the moment: what a scraper is shown


class View(Protocol):
    """A live view. Called on the run's thread: it must only take notes."""

    def decided(self, at: float, event: Event, commands: Sequence[Command]) -> None: ...

    def row(self, row: Row) -> None: ...

    def phase(self, text: str) -> None:
        """What the run does before its first decision."""
        ...

    def close(self) -> None: ...


class Monitor:
    """Folds every decision, hands complete rows to the sinks and to the view.

    with Monitor(RunFolds(live=True), pump=SinkPump(sinks), view=view) as monitor:
        monitor.apply(at, event, commands)      # after the core has decided; never raises for a sink, never waits
    """

    def __init__(
        self,
        folds: RunFolds,
        *,
        pump: SinkPump | None = None,
        view: View | None = None,
        more: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """`more`: what a row of the moment tells beside the folds."""
        self.folds = folds
        self._more = more
        self._pump = pump
        self._view = view
        self._fold = folds.apply
        self._is_off = False
        self._next_now = 0.0
        self._loads: dict[EngineId, EngineLoad] = {}
        folds.training.listen(self._row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """Take in one decision. Never raises: a fold or a view that does is switched off, with the cause logged."""
        if self._is_off:
            return
        try:
            self._take(at, event, commands)
        except Exception:
            # Our bug, but no reason to end a training run: the journal has everything, the report can be made again.
            self._is_off = True
            _log.exception(
                "monitoring failed on %s and is off from here on; the run goes on", type(event).__name__
            )

    def _take(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        at = self._fold(at, event, commands)
        if type(event) is LoadReported and event.load is not None:
            self._loads[event.engine] = event.load
        if at >= self._next_now and self._pump is not None:
            self._next_now = at + _NOW_S
            self._pump.put(self._now(at))
        if self._view is not None:
            self._view.decided(at, event, commands)

    def close(self) -> None:
        """End the view, let the sinks finish within their time."""
        if self._view is not None:
            self._view.close()
        if self._pump is not None:
            self._pump.close()

    def _row(self, row: Row) -> None:
        if self._pump is not None:
            self._pump.put(row)
        if self._view is not None:
            self._view.row(row)

    def _now(self, at: float) -> Row:
        folds = self.folds
        values: dict[str, float] = {
            "in_flight/train": folds.lives.in_flight["train"],
            "in_flight/eval": folds.lives.in_flight["eval"],
            "queued": len(folds.lives.queue),
        }
        if (share := folds.account.goodput()) is not None:
            values["goodput"] = share
        for engine, load in self._loads.items():
            values[f"engine/{engine}/running"] = load.running
            values[f"engine/{engine}/waiting"] = load.waiting
            values[f"engine/{engine}/kv_usage"] = load.kv_usage
        if self._more is not None:
            values |= self._more()
        if self._pump is not None:
            values["monitor/dropped"] = sum(self._pump.dropped.values())
        return Row(
            kind="now", at=at, segment=folds.training.segment, step=trained_steps(folds), values=values
        )
