"""Facts about the run as a whole, and the folds that belong together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.domain.commands import FinishRun
from paceline.domain.events import EngineJoined, RunOpened
from paceline.domain.ids import EngineId
from paceline.domain.load import EngineInfo
from paceline.observe.account import Account, goodput
from paceline.observe.conversations import Conversations
from paceline.observe.fold import Fold, Folds, Handler
from paceline.observe.lengths import Lengths
from paceline.observe.lives import Lives
from paceline.observe.rows import Row
from paceline.observe.spans import Spans
from paceline.observe.training import Training


class Run(Fold):
    """Who ran, from when to when, and how it ended."""

    def __init__(self) -> None:
        self.run_id = ""
        self.seed = 0
        self.opened_at: float | None = None
        self.finished_at: float | None = None
        self.status: str | None = None
        """None while it runs."""
        self.reason = ""
        self.engines: dict[EngineId, EngineInfo] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {RunOpened: self._opened, EngineJoined: self._joined, FinishRun: self._finish}

    def _opened(self, at: float, event: RunOpened) -> None:
        self.run_id, self.seed = event.run_id, event.seed
        self.status, self.reason = None, ""
        if self.opened_at is None:
            self.opened_at = at

    def _joined(self, at: float, event: EngineJoined) -> None:
        self.engines[event.info.id] = event.info

    def _finish(self, at: float, command: FinishRun) -> None:
        self.status, self.reason, self.finished_at = command.status, command.reason, at


class RunFolds:
    """Everything a run is told by. `live` keeps what a live run needs, in bounded memory; else all of it."""

    def __init__(self, *, live: bool = False, timeline_steps: int | None = 4) -> None:
        self.run = Run()
        self.lives = Lives()
        self.account = Account(self.lives)
        self.lengths = Lengths(self.lives)
        self.training = Training(self.lives, self.account, self.lengths, keep=1024 if live else None)
        self.spans = Spans(timeline_steps)
        self.conversations = Conversations()
        folds: tuple[Fold, ...] = (self.run, self.lives, self.lengths, self.training)
        if not live:
            folds = (*folds, self.spans, self.conversations)
        self._folds = Folds(folds)
        self.apply = self._folds.apply
        """`apply(at, event, commands)`: take in one decision."""
        self.read = self._folds.read
        """`read(decisions)`: take in a whole journal."""

    @property
    def elapsed(self) -> float:
        """Seconds of the run's clock from its opening to the latest decision."""
        return self._folds.now - self.run.opened_at if self.run.opened_at is not None else 0.0


def summary(folds: RunFolds, *, wall_s: float | None = None) -> dict[str, Any]:
    """The run in one JSON object, for scripts.

    `heldout` has first and last reward by eval environment; `heldout_start` and `heldout_end` are the means over
    those environments. `goodput` is shipped tokens over all tokens sampled for training. `wall_s` is the run's own
    clock unless given.
    """
    heldout = held_out(folds.training.evals)
    steps = folds.training.steps
    run = folds.run
    lines = folds.account.lines()
    last = steps[-1] if steps else None
    seen = [row.at for row in (*steps, *folds.training.evals)]
    clock = max([*seen, run.finished_at or 0.0]) - (run.opened_at or 0.0)
    return {
        "run": run.run_id,
        "status": run.status or "running",
        "reason": run.reason,
        "seed": run.seed,
        "steps": trained_steps(folds),
        "heldout_start": _mean([ends["start"] for ends in heldout.values()]),
        "heldout_end": _mean([ends["end"] for ends in heldout.values()]),
        "heldout": heldout,
        "reward": last.values.get("train/all/reward") if last else None,
        "wall_s": round(max(0.0, clock) if wall_s is None else wall_s, 3),
        "goodput": _round(goodput(lines)),
        "tokens_sampled": sum(line.sampled for line in lines),
        "tokens_conserved": all(line.is_conserved for line in lines),
        "rollouts": sum(line.launched for line in lines),
        "staleness_max": max((row.values.get("staleness/max", 0) for row in steps), default=0),
    }


def trained_steps(folds: RunFolds) -> int:
    """The last step that the trainer has acknowledged; 0 before the first."""
    return next((row.step for row in reversed(folds.training.steps) if row.trained), 0)


def held_out(evals: list[Row]) -> dict[str, dict[str, float]]:
    """First and last held-out reward of every eval environment, with the versions they measured."""
    ends: dict[str, dict[str, float]] = {}
    for row in evals:
        reward = row.values.get(f"eval/{row.env}/reward")
        if reward is None or not math.isfinite(reward):
            continue
        entry = ends.setdefault(
            row.env, {"start": reward, "end": reward, "start_version": row.step, "end_version": row.step}
        )
        if row.step >= entry["end_version"]:
            entry["end"], entry["end_version"] = reward, row.step
    return ends


def _mean(values: list[float]) -> float | None:
    return _round(sum(values) / len(values)) if values else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
