"""Trainer and weights of recorded runs, as models of what surrounds the core.

    seconds of a step = step_s + tokens of its batch / tokens_per_s

from when the trainer could begin it (the batch is shipped, the step before is done) until it says that it is done; fitted by
least squares of the relative error. All else is a mean. Runs whose batches differ tell a step from its tokens; the batches of one
run are mostly as large as each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec
import numpy as np

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.errors import ConfigError
from paceline.sim.fit import non_negative
from paceline.sim.requests import Record
from paceline.sim.world import TrainerModel, WeightsModel

LEAST = 3
"""Steps below which nothing is said of a trainer. Not counted are the first of each life of a run, in which it warms up, and those
whose batch was cut in an earlier life."""


class RecordedWorld(msgspec.Struct, frozen=True):
    """What surrounded the core of runs, but for engines and environments."""

    trainer: TrainerModel
    weights: WeightsModel
    """Live engines compute the KV of what runs anew with new weights: `recompute`."""


def recorded_world(records: Iterable[Record]) -> RecordedWorld:
    """Of one run or of several, one after the other. ConfigError when they took too few steps to tell."""
    seen = _Seen()
    for at, event, commands in records:
        seen.apply(at, event, commands)
    if len(seen.steps) < LEAST:
        raise ConfigError(
            f"the journal holds {len(seen.steps)} trained steps that count, and to tell what one costs takes {LEAST}; those count "
            "behind the first of each life of a run whose batch was cut in that life: let the run go on"
        )
    tokens, seconds = map(np.array, zip(*seen.steps, strict=True))
    step_s, token_s = non_negative(np.stack([np.ones(len(tokens)), tokens], axis=1), seconds)
    return RecordedWorld(
        TrainerModel(
            step_s=float(step_s),
            tokens_per_s=1 / float(token_s) if token_s else None,
            ship_s=fmean(seen.ships),
            publish_s=fmean(seen.publishes or seen.seen_publishes or (0.0,)),
        ),
        WeightsModel(mode="recompute", load_s=fmean(seen.loads) if seen.loads else 0.0),
    )


class _Seen:
    """The steps of runs."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        """Tokens of a batch, and seconds that it took to train."""
        self._is_warm = False
        """Whether the trainer of the run at hand has taken its first step."""
        self.ships: list[float] = []
        self.publishes: list[float] = []
        """As the trainer told."""
        self.seen_publishes: list[float] = []
        """From the word that a step was taken to its weights; where they come first, there is nothing to be seen."""
        self._published = self._trained_step = 0
        """Newest version, and step, that was told."""
        self.loads: list[float] = []
        self._batches: dict[int, int] = {}
        """Tokens of those that were cut, by step."""
        self._shipped: dict[int, float] = {}
        self._done = 0.0
        """When the last step was."""

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.RunOpened):
            self._batches, self._shipped, self._done, self._is_warm = {}, {}, 0.0, False
        elif isinstance(event, on.BatchShipped):
            self._shipped[event.step] = at
            self.ships.append(event.pack_s + event.send_s)
        elif isinstance(event, on.StepTrained):
            # A fast trainer's word may overtake that its batch was shipped.
            began = max(self._done, self._shipped.pop(event.step, at))
            seconds = at - began
            publish_s = event.metrics.get("publish_s")
            if publish_s is not None and self._is_warm:
                self.publishes.append(publish_s)
                if event.step <= self._published:  # before it was acknowledged
                    seconds -= publish_s
            if self._is_warm and event.step in self._batches and seconds > 0.0:
                self.steps.append((self._batches[event.step], seconds))
            self._done, self._is_warm, self._trained_step = at, True, event.step
        elif isinstance(event, on.PolicyPublished):
            self._published = event.version
            if self._is_warm and event.version <= self._trained_step:
                self.seen_publishes.append(at - self._done)
        elif isinstance(event, on.WeightsLoaded) and event.error is None:
            self.loads.append(event.seconds)
        for command in commands:
            if isinstance(command, do.ShipBatch):
                self._batches[command.batch.step] = command.batch.tokens
