"""One row a rollout: how it ended, what it cost, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.group import Verdict
from paceline.domain.ids import RolloutId
from paceline.observe.fold import Fold, Handler


class RolloutRow(msgspec.Struct, gc=False):
    """What the log tells of a rollout that has ended."""

    rollout: str
    group: int
    env: str
    split: str
    task: int
    ending: str
    cause: str | None
    reward: float | None
    turns: int
    prompt_tokens: int
    """Prompt tokens new to a turn, over all turns."""
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    started: float
    """Second of the run; `ended` too."""
    ended: float
    model_s: float
    gate_s: float
    env_s: float
    fate: str | None = None
    """Where its tokens went; None while its group is open."""
    reason: str = ""
    advantage: float | None = None
    step: int | None = None
    """The batch that it shipped in."""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class RolloutRows(Fold):
    """All rows, in the order in which rollouts ended."""

    def __init__(self) -> None:
        self.rows: dict[RolloutId, RolloutRow] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {
            on.RolloutEnded: self._ended,
            on.GroupProcessed: self._processed,
            do.NoteRetry: self._retried,
            do.NoteStale: self._stale,
            do.NoteDiscarded: self._discarded,
            do.ShipBatch: self._shipped,
            do.FinishRun: self._finished,
        }

    def _ended(self, at: float, event: on.RolloutEnded) -> None:
        r = event.rollout
        self.rows.pop(r.id, None)
        self.rows[r.id] = RolloutRow(
            rollout=str(r.id),
            group=r.id.group,
            env=r.task.env,
            split=r.task.split,
            task=r.task.index,
            ending=r.outcome.ending,
            cause=r.outcome.cause,
            reward=r.reward,
            turns=len(r.turns),
            prompt_tokens=r.prompt_tokens,
            sampled_tokens=r.sampled_tokens,
            oldest_version=r.oldest_version,
            newest_version=r.newest_version,
            started=r.started,
            ended=r.ended,
            model_s=r.model_s,
            gate_s=r.gate_s,
            env_s=r.env_s,
            fate="eval" if r.task.split == "eval" else None,
        )

    def _settle(self, rollout: RolloutId, fate: str, reason: str) -> None:
        if row := self.rows.get(rollout):
            row.fate, row.reason = fate, reason

    def _processed(self, at: float, event: on.GroupProcessed) -> None:
        for verdict in event.result.verdicts:
            self._judged(verdict)

    def _judged(self, verdict: Verdict) -> None:
        self._settle(verdict.rollout, verdict.fate, verdict.reason)
        if row := self.rows.get(verdict.rollout):
            row.advantage = verdict.advantage

    def _retried(self, at: float, command: do.NoteRetry) -> None:
        self._settle(command.rollout, "failed", f"tried again: {command.reason}")

    def _stale(self, at: float, command: do.NoteStale) -> None:
        if command.action == "dropped":
            self._settle(command.rollout, "stale", command.reason)

    def _discarded(self, at: float, command: do.NoteDiscarded) -> None:
        self._settle(command.rollout, "discarded", command.reason)

    def _shipped(self, at: float, command: do.ShipBatch) -> None:
        for rollout in command.batch.rollouts:
            self._settle(rollout, "shipped", command.reason)
            if row := self.rows.get(rollout):
                row.step = command.batch.step

    def _finished(self, at: float, command: do.FinishRun) -> None:
        if command.status == "done":
            for row in self.rows.values():
                if row.fate == "queued":
                    row.fate = "left_over"
