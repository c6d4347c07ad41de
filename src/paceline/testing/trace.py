"""What happened in a scripted world, kept for assertions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.domain import commands as do
from paceline.domain.batch import Batch
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName, GroupId
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout

E = TypeVar("E")


@dataclass(slots=True)
class Trace:
    """Every decision, and the facts that tests ask for most."""

    journal: list[tuple[float, Event, list[Command]]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    shipped_at: list[float] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    launched: list[do.StartRollout] = field(default_factory=list)
    ended: list[Rollout] = field(default_factory=list)
    parked: list[do.ParkRollout] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """What engine requests sampled, in order."""
    results: dict[GroupId, GroupResult] = field(default_factory=dict)
    peak_in_flight: int = 0
    finish: do.FinishRun | None = None

    @property
    def evals(self) -> list[do.ReportEval]:
        """Every eval epoch that was completed, in order."""
        return self.commands(do.ReportEval)

    def commands(self, kind: type[E]) -> list[E]:
        """Every command of a kind, in order."""
        return [c for _, _, commands in self.journal for c in commands if isinstance(c, kind)]

    def timed(self, kind: type[E]) -> list[tuple[float, E]]:
        """Every command of a kind with the second it was given at, in order."""
        return [(at, c) for at, _, commands in self.journal for c in commands if isinstance(c, kind)]

    def events(self, kind: type[E]) -> list[tuple[float, E]]:
        """Every event of a kind with its second, in order."""
        return [(at, event) for at, event, _ in self.journal if isinstance(event, kind)]

    def shipped_groups(self) -> dict[GroupId, tuple[EnvName, int]]:
        """(environment, task) of every group that shipped anything, in the order of shipping."""
        return {s.rollout.group: (s.env, s.task_index) for batch in self.batches for s in batch.samples}

    def encoded(self) -> bytes:
        """The whole journal as bytes: equal for two runs that went the same way."""
        return msgspec.json.encode(self.journal, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a journal")
