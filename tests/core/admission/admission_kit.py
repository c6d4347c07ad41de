"""One engine as a controller sees it, without a core."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.accounting import StreamAccount
from paceline.core.flights import Flight
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineLoad
from paceline.domain.task import TaskRef


class Held:
    """What an engine holds, set by hand."""

    id = "e0"
    held = 0
    calls = 0
    calling_tokens = 0
    working_tokens = 0
    flights: Mapping[RolloutId, Flight] = {}

    def __init__(self, active: int = 0) -> None:
        self.active = active


def flight(sampled: int = 100, started: float = 0.0, number: int = 0) -> Flight:
    made = Flight(RolloutId(number, 0), TaskRef("env", "train", 0), "e0", started, StreamAccount(), started)
    made.sampled = sampled
    return made


def load(usage: float = 0.0, running: int = 1, waiting: int = 0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, kv_usage=usage, preemptions=preemptions)
