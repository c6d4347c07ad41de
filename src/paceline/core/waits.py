"""What a run waits for, when somebody asks: of each kind the longest wait, with how many others there are.

Read from the core's state and nothing else, so it costs nothing while nobody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.fleet import EngineState
from paceline.core.flights import Flight

if TYPE_CHECKING:
    from paceline.core.scheduler import Core


class Wait(NamedTuple):
    """Something that waits, and what for."""

    what: str
    """A sentence without an end: "rollout g3.m1.a0 of env 'x' waits for its environment"."""
    since: float | None
    """Seconds on the run's clock; None where the core does not note it."""
    others: int = 0
    """How many more wait for the same."""

    def told(self, now: float) -> str:
        """The sentence."""
        text = self.what
        if self.since is not None:
            text += f", for {max(0.0, now - self.since):.0f} s"
        return text + (f" (and {self.others} more)" if self.others else "")


class Progress(NamedTuple):
    """Numbers that change whenever a run gets any further."""

    launched: int
    sampled: int
    in_flight: int
    processing: int
    cut: int
    unshipped: int
    trained: int
    held: int


def progress(core: Core) -> Progress:
    """How far it is. O(environments)."""
    accounts = core.account.streams().values()
    return Progress(
        sum(account.launched for account in accounts),
        sum(account.sampled for account in accounts),
        len(core.flights),
        len(core.processing),
        core.cut,
        core.unshipped,
        core.trained,
        core.fleet.held,
    )


def waits(core: Core) -> list[Wait]:
    """All kinds of waits there are, the longest first. O(in flight). Empty: nothing will ever happen again."""
    found: dict[str, tuple[float, Flight, int]] = {}
    for flight in core.flights.all():
        what, since = _of_flight(flight, core)
        oldest = found.get(what)
        if oldest is None:
            found[what] = (since, flight, 0)
        elif since < oldest[0]:
            found[what] = (since, flight, oldest[2] + 1)
        else:
            found[what] = (oldest[0], oldest[1], oldest[2] + 1)
    told = [
        Wait(f"rollout {flight.id} of env {flight.task.env!r} waits for {what}", since, others)
        for what, (since, flight, others) in found.items()
    ]
    told.sort(key=lambda wait: wait.since or 0.0)
    if core.fleet.stopped:  # what waits at a gate waits for this, and so does whatever has not started
        told.insert(0, Wait(f"everything waits for room to write ({core.fleet.stopped})", None))
    return told + _of_the_rest(core)


def _of_flight(flight: Flight, core: Core) -> tuple[str, float]:
    if flight.calling:
        engine = core.fleet[flight.engine]
        if flight.refused and engine.refusals is not None and not engine.refusals.took(flight.granted_at):
            return _refused(flight, engine)
        return f"engine {flight.engine!r} to answer", flight.granted_at
    if flight.cancelled is not None:
        return f"its environment to stop ({flight.cancelled})", flight.waits_since
    if not flight.engine:
        return "a permit, to go on after the restart", flight.waits_since
    if flight.held:
        return "the scheduling policy to release it", flight.waits_since
    if flight.parked:
        return f"room on engine {flight.engine!r}", flight.waits_since
    if flight.at_gate:
        return _gate(core.fleet[flight.engine]), flight.waits_since
    if flight.refused:
        return _refused(flight, core.fleet[flight.engine])
    return "its environment", flight.waits_since


def _refused(flight: Flight, engine: EngineState) -> tuple[str, float]:
    said = f"engine {engine.id!r} to take its call: it says that it is busy (429)"
    refusals = engine.refusals
    if refusals is None:  # others have been served since
        return said, flight.waits_since
    return f"{said}, and has refused {refusals.calls} calls in a row", refusals.since


def _gate(engine: EngineState) -> str:
    if engine.out is not None:
        return f"any engine to be back ({engine.id!r}: {engine.out})"
    if engine.loading is not None:
        return f"engine {engine.id!r} to load v{engine.loading}"
    return f"memory of engine {engine.id!r}"


def _of_the_rest(core: Core) -> list[Wait]:
    told = []
    groups = list(core.processing)
    if groups:
        told.append(Wait(f"group {groups[0]} waits to be processed", None, len(groups) - 1))
    if core.unshipped:
        first = core.cut - core.unshipped + 1
        told.append(Wait(f"batch {first} waits to be shipped", None, core.unshipped - 1))
    elif core.trained < core.cut:
        step = core.trained + 1
        told.append(Wait(f"step {step} waits for the trainer", None, core.cut - step))
    elif core.fleet.newest < core.trained:
        told.append(Wait(f"the weights of step {core.trained} wait for the trainer to publish them", None))
    told += [
        Wait(f"v{engine.loading} waits for engine {engine.id!r} to load it", None)
        for engine in core.fleet.engines()
        if engine.loading is not None and engine.out is None
    ]
    if core.fleet.is_empty:
        told.append(Wait(f"everything waits for an engine ({core.fleet.why_empty()})", None))
    if core.saving:
        told.append(Wait("a checkpoint waits to be written", None))
    if core.next_alarm is not None:
        told.append(Wait(f"the next start waits for {core.next_alarm:.0f} s on the run's clock", None))
    return told
