"""What a simulation asks of whatever the core takes for one engine, and an engine on its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from paceline.domain.ids import Version
from paceline.domain.load import EngineLoad
from paceline.sim.engine.calls import Call, Totals
from paceline.sim.engine.speed import Speed


class Endpoint(Protocol):
    """One engine, or several behind one address."""

    version: Version
    """Of the weights it samples with."""

    @property
    def speed(self) -> Speed:
        """Capacity and limits that it tells the core."""
        ...

    @property
    def next_at(self) -> float:
        """When `run` has something to do, if nothing comes from outside; inf: never."""
        ...

    @property
    def is_still(self) -> bool:
        """Whether it stands still for new weights."""
        ...

    @property
    def totals(self) -> Totals:
        """What it has done since it started, up to the end of the last stretch."""
        ...

    def submit(self, call: Call, now: float) -> None:
        """Send a request."""
        ...

    def abort(self, call: Call, now: float) -> None:
        """Stop a request. `call.sampled` is then what it had, and its reply may be given at once."""
        ...

    def run(self, now: float) -> Sequence[Call]:
        """Go on to `now`; the calls that have finished."""
        ...

    def load(self, now: float) -> EngineLoad:
        """What it says of itself."""
        ...

    def busy_until(self, now: float) -> tuple[float, float]:
        """Seconds of computing and blocks times seconds, the stretch in hand included."""
        ...

    def stop(self, now: float, *, drain: bool = False) -> None:
        """Stand still at the end of the step in hand, or with `drain` when nothing runs any more; see `is_still`."""
        ...

    def go_on(self, now: float, version: Version | None = None, *, recompute: bool = False) -> None:
        """Sample again, with `version` if it is given; with `recompute` all KV is dropped first."""
        ...

    def kill(self) -> Sequence[Call]:
        """It is gone, with all it held; the calls it had."""
        ...


def drive(engine: Endpoint, until: float = inf) -> Sequence[Call]:
    """Let an engine work alone until nothing is left to do, or `until`; what finished, in order."""
    done: list[Call] = []
    while engine.next_at <= until and engine.next_at < inf:
        done += engine.run(engine.next_at)
    return done
