"""What a scripted world does: which environments there are, how long things take, how they end.

A test says only what it is about; everything else has a small default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from paceline.config import EvalSection
from paceline.core.curriculum import Source
from paceline.core.setup import CoreSetup, OnStale, TrainSpec
from paceline.core.streams import key, uniform
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import COMPLETED, Outcome
from paceline.domain.task import TaskRef


def train_env(
    name: EnvName = "env",
    *,
    tasks: int | None = None,
    group_size: int = 2,
    weight: float = 1.0,
    epochs: int | None = None,
    sampler: str = "sequential",
    max_attempts: int = 1,
    tasks_per_minute: float | None = None,
    on_stale: OnStale = "drop",
) -> TrainSpec:
    """A training environment with `tasks` tasks; None for an endless source."""
    source = Source(
        name, tasks, weight, "sequential" if sampler == "sequential" else "shuffled", epochs, name
    )
    return TrainSpec(source, group_size, max_attempts, tasks_per_minute, on_stale)


def setup_for(
    *envs: TrainSpec,
    batch: int | None = 4,
    batch_tokens: int | None = None,
    lag: int = 1,
    max_staleness: int = 8,
    max_steps: int = 4,
    evals: Sequence[EvalSection] = (),
    eval_share: float = 0.25,
    seed: int = 0,
    dead_group_limit: int = 512,
    short_last: bool = True,
    checkpoint_every: int = 1000,
    seq_len: int = 64,
) -> CoreSetup:
    """A core's setup with small defaults; one endless environment with groups of 2 when none is given."""
    return CoreSetup(
        seed=seed,
        max_steps=max_steps,
        train=envs or (train_env(),),
        evals=tuple(evals),
        examples={e.label: e.examples for e in evals},
        lag=lag,
        max_staleness=max_staleness,
        eval_share=eval_share,
        target_rollouts=None if batch_tokens else batch,
        target_tokens=batch_tokens,
        seq_len=seq_len,
        short_last=short_last,
        dead_group_limit=dead_group_limit,
        checkpoint_every=checkpoint_every,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rollout will do, unless it is cancelled: turns of (seconds of environment, seconds of model)."""

    turns: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    tokens: int = 4
    """Tokens of each turn."""
    reward: float | None = 0.0
    outcome: Outcome = COMPLETED
    call_error: str | None = None
    """The engine request of the last turn fails with this, and the rollout with it."""


def coin(rollout: RolloutId, task: TaskRef, seed: int) -> float:
    """A reward of 0 or 1 that depends on the rollout alone."""
    return float(uniform(key(seed, "reward", rollout.group, rollout.member, rollout.attempt), 0) < 0.5)


def alternating(rollout: RolloutId, task: TaskRef, seed: int) -> float:
    """1, 0, 1, 0, … by member: every group of two or more has signal."""
    return float(rollout.member % 2 == 0)


@dataclass(frozen=True, slots=True)
class Script:
    """Durations, endings and faults, each a function so that a test says only what it is about."""

    seconds: Callable[[RolloutId, TaskRef], float] = lambda _rollout, _task: 1.0
    """How long the one model call of a rollout takes; `plan` replaces it."""
    reward: Callable[[RolloutId, TaskRef, int], float | None] = coin
    plan: Callable[[RolloutId, TaskRef], Plan] | None = None
    """The whole course of a rollout."""
    deadline_s: float = inf
    """Seconds after which a rollout is truncated, unscored."""
    cancel_s: Callable[[RolloutId], float] = lambda _rollout: 0.0
    """Seconds until a cancelled rollout has really stopped."""
    load_s: Callable[[EngineId, Version], float] = lambda _engine, _version: 0.0
    load_error: Callable[[EngineId, Version], str | None] = lambda _engine, _version: None
    revive_s: Callable[[EngineId], float] = lambda _engine: inf
    """Seconds until an engine that was taken out joins again, with what it held, or v0 if it was lost."""
    train_s: Callable[[int], float] = lambda _step: 1.0
    """Seconds of one optimizer step."""
    process_s: Callable[[GroupId], float] = lambda _group: 0.0
    repeat_s: Callable[[RolloutId], float] = lambda _rollout: 0.0
    """Seconds that a rollout of an earlier life takes to come to the end of its record."""
    leaves: Callable[[RolloutId, float], int | None] = lambda _rollout, _now: None
    """The turn at which its environment does something else than it did then, given what time it is."""
    ship_s: float = 0.0


def chaos(seed: int, *, failures: float = 0.2, load_failures: float = 0.1, mean_s: float = 2.0) -> Script:
    """A world that stalls, fails and reorders. Every rollout has its own random stream, keyed by its id, so that a
    change in one does not reshuffle the rest; the seed is the bug report.

    `failures`: share of attempts that end badly. `load_failures`: share of weight loads that fail the first time.
    """
    tries: dict[tuple[EngineId, Version], int] = {}

    def chance(*what: int | str) -> float:
        return uniform(key(seed, *what), 0)

    def seconds(*what: int | str) -> float:
        # Heavy-tailed: most are short, a few take ten times the mean.
        return mean_s * 0.2 / max(0.02, chance("s", *what))

    def plan(rollout: RolloutId, task: TaskRef) -> Plan:
        who = (*rollout, task.env)
        turns = tuple(
            (seconds("env", *who, n) if chance("waits", *who, n) < 0.5 else 0.0, seconds("model", *who, n))
            for n in range(1 + int(3 * chance("turns", *who)))
        )
        tokens = 1 + int(6 * chance("tokens", *who))
        reward: float | None = float(chance("reward", *who) < 0.5)
        outcome, call_error = COMPLETED, None
        fault = chance("fault", *who)
        if fault < failures:
            kind = int(6 * fault / failures)
            if kind == 0:
                call_error = "503 from the engine"
            elif kind == 4:
                reward = None
            elif kind == 5:
                outcome = Outcome("truncated", "turns")
            else:
                outcome = (
                    Outcome("failed", "infrastructure", "sandbox lost"),
                    Outcome("failed", "environment", "ValueError: no"),
                    Outcome("cancelled", "self", "CancelledError"),
                )[kind - 1]
        return Plan(turns, tokens, reward, outcome, call_error)

    def load_error(engine: EngineId, version: Version) -> str | None:
        tried = tries[engine, version] = tries.get((engine, version), 0) + 1
        return "no space" if tried == 1 and chance("load", engine, version) < load_failures else None

    def leaves(rollout: RolloutId, now: float) -> int | None:
        turn = int(8 * chance("leaves", *rollout, str(now)))
        return turn if turn < 3 else None

    return Script(
        plan=plan,
        deadline_s=20 * mean_s,
        cancel_s=lambda rollout: mean_s * chance("cancel", *rollout),
        load_s=lambda engine, version: mean_s * chance("load_s", engine, version),
        load_error=load_error,
        revive_s=lambda _engine: mean_s,
        train_s=lambda step: 2 * mean_s * chance("train", step),
        process_s=lambda group: mean_s * chance("process", group),
        repeat_s=lambda rollout: mean_s * chance("repeat", *rollout),
        leaves=leaves,
        ship_s=0.1,
    )
