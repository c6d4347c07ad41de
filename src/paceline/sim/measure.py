"""What happened in a run, step by step: a fold over events and commands, simulated or recorded.

`paceline.sim.metrics` makes numbers of it. Lengths are sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.core.staleness import staleness
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.task import TaskRef


class StepSeen(msgspec.Struct):
    """One batch."""

    step: int
    began: float
    """When the first rollout was started after the batch before it was cut."""
    cut: float
    tokens: int
    """Sampled tokens in it."""
    signal_tokens: int
    """Of them, those of rollouts with an advantage."""
    lengths: list[int]
    ends: list[float]
    """When its rollouts ended."""
    staleness: list[int]
    """Of each rollout, from its oldest token."""
    versions: list[int]
    """Of each rollout: how many sampled it."""
    envs: list[EnvName]
    drawn: list[float]
    """When each rollout was first started; one that was put off and comes again was drawn when it was started first."""
    tasks: set[TaskRef]
    settled_until: float = 0.0
    """What was drawn before had trained, or was lost, by the cut; something that was drawn then had not."""
    put_off: int = 0
    """Rollouts that were put off, and had not been started again when it was cut."""
    trained: float | None = None
    """When the trainer had taken the step."""
    train_s: float = 0.0
    """Seconds that it took, as it says itself; 0 where it does not."""


class Measure:
    """Folds decisions into steps and sums."""

    def __init__(self) -> None:
        self.steps: list[StepSeen] = []
        self.ended: dict[str, int] = {}
        """Rollouts by ending and cause."""
        self.sampled = 0
        """Tokens sampled by rollouts that have ended."""
        self.lost_tokens: dict[str, int] = {}
        """Tokens of rollouts that did not train, by fate; those of attempts that were tried again as `failed`."""
        self.latencies: list[float] = []
        """Seconds from the first start of a group to its last end."""
        self.waits: list[float] = []
        """Seconds rollouts waited at the turn gate."""
        self.drawn_lengths: list[int] = []
        """Of every rollout that ended by itself."""
        self.turns = 0
        self._lengths: dict[RolloutId, tuple[int, float, int]] = {}
        self._groups: dict[GroupId, tuple[float, float]] = {}
        """First start and last end so far, of those that are open."""
        self._moved: dict[tuple[GroupId, int], GroupId] = {}
        """(group of the id, member) -> the group that it goes on in."""
        self._split: dict[GroupId, list[tuple[GroupId, int]]] = {}
        """Those that went on in each."""
        self._began: float | None = None
        self._put_off = 0
        self._draws = _Draws()
        self.trained_tokens = 0
        """Sampled tokens of all batches."""

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, on.RolloutEnded):
            self._rollout_ended(at, event)
        elif isinstance(event, on.GroupProcessed):
            self._group_processed(event)
        elif isinstance(event, on.StepTrained):
            for seen in reversed(self.steps):
                if seen.step == event.step:
                    seen.trained = at
                    seen.train_s = event.metrics.get("step_s", 0.0)
        for command in commands:
            if isinstance(command, do.StartRollout):
                self._draws.start(at, command)
                if self._began is None:
                    self._began = at
                self._groups.setdefault(self._group_of(command.rollout), (at, at))
                self._put_off -= command.put_off > 0 and not command.rollout.attempt
            elif isinstance(command, do.PutOff):
                self._put_off += command.size
                self._draws.put_off(at, command)
            elif isinstance(command, do.ShipBatch):
                self._ship(at, command.batch)
            elif isinstance(command, do.NoteStale) and command.action == "dropped":
                self._throw_away("stale", command)
            elif isinstance(command, do.NoteDiscarded):
                self._throw_away("discarded", command)
            elif isinstance(command, do.NoteRetry):
                known = self._lengths.pop(command.rollout, None)
                if known is not None:
                    self._lose("failed", known[0])
            elif isinstance(command, do.SplitGroup):
                self._groups[command.rest] = self._groups.get(command.group, (at, at))
                members = [(rollout.group, rollout.member) for rollout in command.rollouts]
                self._split[command.rest] = members
                self._moved |= dict.fromkeys(members, command.rest)
            elif isinstance(command, do.ForgetGroup):
                self._groups.pop(command.group, None)
                for member in self._split.pop(command.group, ()):
                    self._moved.pop(member, None)

    def _rollout_ended(self, at: float, event: on.RolloutEnded) -> None:
        rollout = event.rollout
        outcome = rollout.outcome
        name = outcome.ending if outcome.cause is None else f"{outcome.ending} ({outcome.cause})"
        self.ended[name] = self.ended.get(name, 0) + 1
        tokens = rollout.sampled_tokens
        self.sampled += tokens
        self.turns += len(rollout.turns)
        if rollout.task.split == "eval":
            return
        if outcome.ending not in ("completed", "truncated"):
            self._draws.settle(rollout.id)  # until it is tried again
        self.waits.append(rollout.gate_s)
        versions = {version for turn in rollout.turns for version, _ in turn.versions}
        self._lengths[rollout.id] = tokens, at, len(versions)
        if outcome.ending in ("completed", "truncated"):
            self.drawn_lengths.append(tokens)
        group = self._group_of(rollout.id)
        first, _ = self._groups.get(group, (rollout.started, at))
        self._groups[group] = first, at

    def _group_of(self, rollout: RolloutId) -> GroupId:
        return self._moved.get((rollout.group, rollout.member), rollout.group)

    def _group_processed(self, event: on.GroupProcessed) -> None:
        result = event.result
        times = self._groups.pop(result.group, None)
        if times is not None:
            self.latencies.append(times[1] - times[0])
        for verdict in result.verdicts:
            if verdict.fate != "queued":
                self._draws.settle(verdict.rollout)
                known = self._lengths.pop(verdict.rollout, None)
                if known is not None:
                    self._lose(verdict.fate, known[0])

    def _throw_away(self, fate: str, command: do.NoteStale | do.NoteDiscarded) -> None:
        self._lose(fate, command.tokens)
        self._lengths.pop(command.rollout, None)
        self._draws.settle(command.rollout)

    @property
    def drawn_tasks(self) -> Mapping[TaskRef, float]:
        """When a rollout of each task was first started."""
        return self._draws.drawn

    def _lose(self, fate: str, tokens: int) -> None:
        self.lost_tokens[fate] = self.lost_tokens.get(fate, 0) + tokens

    def _ship(self, at: float, batch: Any) -> None:
        began = at if self._began is None else self._began
        seen = StepSeen(batch.step, began, at, 0, 0, [], [], [], [], [], [], set())
        seen.put_off = self._put_off
        self._began = None
        for sample in batch.samples:
            tokens = sample.trainable_tokens
            seen.tokens += tokens
            advantage = sample.advantage
            if advantage if isinstance(advantage, float) else np.any(advantage):
                seen.signal_tokens += tokens
        oldest: dict[RolloutId, int] = {}
        envs: dict[RolloutId, EnvName] = {}
        for sample in batch.samples:
            envs[sample.rollout] = sample.env
            version = sample.oldest_version
            oldest[sample.rollout] = min(version, oldest.get(sample.rollout, version))
        for rollout in batch.rollouts:
            length, ended, versions = self._lengths.pop(rollout, (0, at, 1))
            seen.lengths.append(length)
            seen.ends.append(ended)
            seen.versions.append(versions)
            seen.staleness.append(staleness(oldest[rollout], batch.step))
            seen.envs.append(envs[rollout])
            seen.drawn.append(self._draws.at(rollout, at))
            self._draws.settle(rollout)
            task = self._draws.tasks.get(rollout.group)
            if task is not None:
                seen.tasks.add(task)
        seen.settled_until = self._draws.settled_until(at)
        self.trained_tokens += seen.tokens
        self.steps.append(seen)


class _Draws:
    """When rollouts were drawn, and which of them are still to be settled: trained, or lost. A retry, and a response that was put off
    and comes again, are the rollout that was drawn."""

    def __init__(self) -> None:
        self.tasks: dict[GroupId, TaskRef] = {}
        self.drawn: dict[TaskRef, float] = {}
        """When a rollout of a task was first started."""
        self._at: dict[tuple[GroupId, int], float] = {}
        self._unsettled: dict[tuple[GroupId, int], float] = {}
        self._put_off: dict[int, float] = {}
        """Number of what was put off -> when its first rollout was drawn."""
        self._waiting: set[int] = set()
        """Those that have not come again."""

    def start(self, at: float, command: do.StartRollout) -> None:
        task, rollout = command.task, command.rollout
        if task.split != "train":
            return
        self.tasks[rollout.group] = task
        self.drawn.setdefault(task, at)
        key = rollout.group, rollout.member
        if key not in self._at:
            self._waiting.discard(command.put_off)
            self._at[key] = self._put_off.get(command.put_off, at)
        self._unsettled[key] = self._at[key]

    def put_off(self, at: float, command: do.PutOff) -> None:
        known = [self.at(rollout, at) for rollout in command.again]
        self._put_off[command.number] = min(known, default=self.drawn.get(command.task, at))
        self._waiting.add(command.number)

    def at(self, rollout: RolloutId, default: float) -> float:
        return self._at.get((rollout.group, rollout.member), default)

    def settle(self, rollout: RolloutId) -> None:
        self._unsettled.pop((rollout.group, rollout.member), None)

    def settled_until(self, now: float) -> float:
        return min([now, *self._unsettled.values(), *(self._put_off[number] for number in self._waiting)])
