"""What every admission controller offers, and the parts that several of them use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from paceline.core.flights import Flight
from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.domain.load import EngineInfo, EngineLoad

BURST_S = 5.0
"""Window of the burst rule, in seconds: the published controller's."""


class Holdings(Protocol):
    """What an engine holds now, as the core counts it (`EngineState`)."""

    @property
    def id(self) -> EngineId: ...

    @property
    def held(self) -> Version:
        """Version of the weights it holds."""
        ...

    @property
    def active(self) -> int:
        """Rollouts placed on it that are not parked."""
        ...

    @property
    def calls(self) -> int:
        """Engine requests under way."""
        ...

    @property
    def calling_tokens(self) -> int:
        """Contexts of the calls under way, as they were when the calls began."""
        ...

    @property
    def working_tokens(self) -> int:
        """Contexts of all active rollouts, those between turns included."""
        ...

    @property
    def flights(self) -> Mapping[RolloutId, Flight]:
        """The rollouts placed on it, oldest first but for those that moved here; parked ones included."""
        ...


class Admission(ABC):
    """Decides for each engine how many rollouts it may hold. Pure: `now` is given, nothing is awaited.

    What is not abstract is what a controller does when it has no opinion.
    """

    learns = True
    """Whether it wants to hear of rollouts (`started` to `ended`); one that does not costs nothing."""

    def joined(self, info: EngineInfo) -> None:
        """A new engine, or one that is back."""

    def observe(self, engine: Holdings, load: EngineLoad | None, now: float) -> None:
        """A reading of its metrics; None when it did not answer, which is never read as free."""

    # ── what it is told, when it learns; each after the core has counted it ──

    def started(self, engine: Holdings, flight: Flight, now: float) -> None:
        """A rollout was placed on it, or a parked one goes on."""

    def turn_asked(self, engine: Holdings, flight: Flight, now: float) -> None:
        """A rollout wants a call with `flight.context` tokens; `flight.continues` if it is the same turn's."""

    def turn_granted(self, engine: Holdings, flight: Flight, now: float) -> None:
        """The call begins."""

    def segment_ended(
        self,
        engine: Holdings,
        flight: Flight,
        sampled: int,
        cached: int,
        seconds: float,
        error: str | None,
        now: float,
        *,
        is_busy: bool = False,
    ) -> None:
        """The call has ended; `flight.context` includes what it sampled. `is_busy`: the engine refused it, because it has
        too much to do."""

    def ended(self, engine: Holdings, flight: Flight, now: float) -> None:
        """The rollout has ended and its permit is free."""

    # ── what it answers ──

    @abstractmethod
    def cap(self, engine: EngineId) -> int:
        """Rollouts it may hold now, at least 1."""

    @abstractmethod
    def room(self, engine: EngineId, active: int) -> int:
        """Rollouts that may start on it now, given what it holds; not above `cap - active`, may be negative.

        Changes only with `active` and with what is told of this engine by `joined`, `observe`, `started`, `segment_ended` and
        `ended`: the core asks again after these, and not at each event."""

    def turn_tokens(self, engine: EngineId) -> int | None:
        """Tokens of context that its calls may have together; None sets no limit. One call may always run."""
        return None

    def to_park(self, engine: EngineId, active: int) -> int:
        """Rollouts to take off it now. Asked once after each `observe`."""
        return 0

    def prefill_s(self, engine: EngineId) -> float | None:
        """Seconds that a prompt token takes there that is not cached, where the controller has learnt it."""
        return None

    @abstractmethod
    def reason(self, engine: EngineId) -> str:
        """Why its cap is what it is, in words."""

    # ── resuming ──

    def snapshot(self) -> dict[str, Any]:
        """What `restore` takes back; msgpack-able."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was learnt. Call before the first engine joins; state of another controller is ignored."""


class Bounds(msgspec.Struct, frozen=True):
    """What a controller may choose from, for each engine."""

    floor: int = 1
    """Rollouts it may always hold."""
    most: int = 1024
    """Rollouts it may hold at most; not below the floor."""
    initial: int | None = None
    """Rollouts it may hold at first, instead of capacity over longest context."""
    longest: int | None = None
    """Tokens of the longest context, where the engine does not say its own."""
    group: int = 8
    """Rollouts that may always start at once: a group."""

    def clamp(self, cap: float) -> float:
        return max(float(self.floor), min(float(self.most), cap))


class Burst:
    """Smooths net growth: at most `max(group, cap / 10)` more rollouts in a window of 5 s.

    A rollout that ends by itself makes room for another at once; one that was cancelled does not, or shedding would be
    refilled as fast as it sheds.
    """

    __slots__ = ("_group", "_net", "_since")

    def __init__(self, group: int) -> None:
        self._group = group
        self._net = 0
        self._since = float("-inf")

    def roll(self, now: float) -> None:
        """Begin a new window if this one is over."""
        if now >= self._since + BURST_S:
            self._since = now
            self._net = 0

    def started(self) -> None:
        self._net += 1

    def ended(self, *, by_itself: bool) -> None:
        if by_itself:
            self._net -= 1

    def left(self, cap: int) -> int:
        """Starts that are left in this window."""
        return max(self._group, cap // 10) - self._net


class Counter:
    """A number that an engine counts up, read now and then: growth since the last reading.

    An engine that restarted begins at nought again, which is neither a negative growth nor a burst.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: int | None = None

    def growth(self, reading: int) -> int:
        last, self._last = self._last, reading
        return 0 if last is None or reading < last else reading - last
