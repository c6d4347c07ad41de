"""The production core with nothing around it: every command is answered at once, rollouts end in the order of their start.

So a million rollouts go through it, and through whatever sees its decisions, in about a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from paceline.core.admission import FixedCap
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.group import GroupResult, Verdict
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.sample import Sample

Record: TypeAlias = Callable[[float, Event, Sequence[Command]], Any]

PROMPT, SAMPLED = 64, 128
"""Tokens of a turn."""

_IDS = {n: np.arange(n, dtype=np.int32) for n in (PROMPT, SAMPLED)}
_LOGPROBS = np.linspace(-3, 0, SAMPLED, dtype=np.float32)
_LENGTH = PROMPT + SAMPLED


class CoreLoop:
    """One run. `record` sees every decision."""

    def __init__(self, setup: CoreSetup, record: Record, *, cap: int, turns: int) -> None:
        self.core = Core(setup, FixedCap(cap))
        self.ended = 0
        self.saved: list[tuple[int, dict[str, Any]]] = []
        """The newest checkpoint."""
        self.at = 0.0
        self._record = record
        self._turns = turns
        self._events: deque[Event] = deque()
        self._running: deque[do.StartRollout] = deque()
        self._answers: dict[type, Callable[[Any], None]] = {
            do.StartRollout: self._running.append,
            do.ProcessGroup: self._process,
            do.UpdateWeights: self._update,
            do.ShipBatch: self._ship,
            do.SaveCheckpoint: self._save,
        }
        info = EngineInfo("e0", None, None)
        self._events += [on.RunOpened("bench", setup.seed), on.EngineJoined(info, 0)]

    def run(self, rollouts: int) -> None:
        """Until so many have ended in all."""
        events = self._events
        while self.ended < rollouts:
            while events:
                self._handle(events.popleft())
            self._roll_out(self._running.popleft())

    def _handle(self, event: Event) -> None:
        self.at += 1e-4
        commands = self.core.handle(event, self.at)
        self._record(self.at, event, commands)
        for command in commands:
            if answer := self._answers.get(type(command)):
                answer(command)

    def _roll_out(self, start: do.StartRollout) -> None:
        rollout, turns = start.rollout, []
        for number in range(self._turns):
            self._handle(on.TurnRequested(rollout, (number + 1) * _LENGTH, SAMPLED))
            versions = ((self.core.fleet.held, SAMPLED),)
            self._handle(on.SegmentEnded(rollout, "e0", versions, "stop", number * _LENGTH, 0.5))
            turns.append(Turn(_IDS[PROMPT], _IDS[SAMPLED], _LOGPROBS, versions, number > 0, "stop", "e0"))
        reward = float(rollout.member % 2)
        record = Rollout(
            id=rollout, task=start.task, outcome=COMPLETED, turns=tuple(turns), reward=reward, ended=self.at
        )
        self.ended += 1
        self._handle(on.RolloutEnded(record))

    def _process(self, command: do.ProcessGroup) -> None:
        group = command.group
        verdicts = tuple(Verdict(r.id, "queued", "", (_sample(r),), 0.5) for r in group.rollouts)
        self._events.append(on.GroupProcessed(GroupResult(group.id, verdicts, 0.5, 0.25)))

    def _update(self, command: do.UpdateWeights) -> None:
        self._events.append(on.WeightsLoaded(command.engine, command.version, 0.1))

    def _ship(self, command: do.ShipBatch) -> None:
        step = command.batch.step
        self._events += [
            on.BatchShipped(step, 1000, 0.1, 0.1),
            on.StepTrained(step, {"loss": 0.5}),
            on.PolicyPublished(step, f"weights/v{step:06d}"),
        ]

    def _save(self, command: do.SaveCheckpoint) -> None:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(command.state), strict=False)
        self.saved = [(command.step, state)]
        self._events.append(on.CheckpointSaved(command.step, 0.1))


def _sample(rollout: Rollout) -> Sample:
    tokens = rollout.prompt_tokens + rollout.sampled_tokens
    shape = _SHAPES.setdefault(
        tokens, (np.zeros(tokens, np.int32), np.zeros(tokens, np.bool_), np.zeros(tokens, np.float32))
    )
    return Sample(
        token_ids=shape[0],
        trainable=shape[1],
        logprobs=shape[2],
        versions=((rollout.turns[0].versions[0][0], rollout.sampled_tokens),),
        rollout=rollout.id,
        env=rollout.task.env,
        task_index=rollout.task.index,
        ending="completed",
        reward=rollout.reward or 0.0,
        temperature=1.0,
        advantage=0.5,
    )


_SHAPES: dict[int, tuple[Any, Any, Any]] = {}
"""Arrays by length: they are not what is measured."""
