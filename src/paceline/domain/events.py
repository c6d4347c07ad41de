"""Events: everything that can happen to the core. A shell reports them, the journal keeps them.

Every command that needs an answer is answered by exactly one event, errors included: see the table in
`docs/architecture.md`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from paceline.domain.group import GroupResult
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId, Version
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Finish, Rollout, VersionRuns


class RunOpened(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The shell is ready. The first event of a journal, and of each resumption."""

    run_id: str
    seed: int
    resumed_from: int | None = None
    """The step this run goes on behind; None for a fresh run."""
    recovered: bool = False
    """All that was recorded before still stands: attempts that the earlier life left under way go on (`continues`),
    or end by events that follow. Else a resumed run knows what its checkpoint held, and nothing later."""
    checkpoint: int = 0
    """Where a resumed run's checkpoint stands in the journal: it holds all records before this one. 0: it had none."""
    trained: int | None = None
    """The step that a resumed run's trainer goes on from. None for a fresh run, and in journals that did not say."""
    weights: str = ""
    """Where the weights of that step are."""
    continues: tuple[RolloutId, ...] = ()
    """Attempts of the earlier life that go on with the tokens they have, in the order of their start."""
    forgives: tuple[EnvName, ...] = ()
    """Environments whose tasks are drawn again from here on that were in quarantine."""
    config: int = 0
    """Number of this life's config among those that the run directory keeps; 0 where it was not said."""


class EngineJoined(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine answers and may be used once it holds the policy's version."""

    info: EngineInfo
    version: Version
    """The version it holds now."""


class EngineLost(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine no longer answers. Its rollouts end by events of their own."""

    engine: EngineId
    error: str
    leaves: bool = False
    """Somebody took it out of the run: its calls under way end by themselves, and it is not got back."""


class LoadReported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A reading of an engine's metrics; None when it did not answer, which is never read as free."""

    engine: EngineId
    load: EngineLoad | None


class PolicyPublished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The trainer published weights."""

    version: Version
    path: str


class WeightsLoaded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `UpdateWeights`. From here on the engine samples with `version`, unless `error`."""

    engine: EngineId
    version: Version
    seconds: float
    error: str | None = None
    is_outage: bool = False
    """The engine did not answer in time: asking again would only wait as long again, so it is taken out."""


class TurnRequested(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A rollout wants a model call. Answered by `GrantTurn`, now or later, unless it is cancelled."""

    rollout: RolloutId
    context_tokens: int
    """Prompt tokens the call will send."""
    max_tokens: int


class SegmentEnded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `GrantTurn`: one engine request ended, with what it sampled, however it ended."""

    rollout: RolloutId
    engine: EngineId
    versions: VersionRuns
    """Run-length over the tokens this request sampled; empty when it sampled none."""
    finish: Finish
    cached_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None
    is_outage: bool = False
    """The engine did not answer: several in a row take it out. A refusal, or a word that it is busy, does not."""
    given_up: bool = False
    """The environment cancelled its call, which says nothing about the engine. Its tokens are not known."""
    is_busy: bool = False
    """The engine said that it has too much to do (429), which admission takes for a sign where there are no metrics."""


class RolloutContinued(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A rollout of an earlier life has come to the end of its record, and goes on from there."""

    rollout: RolloutId
    tokens: int
    """Sampled in earlier lives, and kept."""
    lost: int = 0
    """Sampled in earlier lives, and gone."""
    turns: int = 0
    """Turns that it has begun."""
    is_mid_turn: bool = False
    """Whether the last of them is still to be finished."""
    oldest: Version | None = None
    """Oldest version behind the tokens that are kept."""
    why: str = ""
    """Why some are gone."""


class RolloutEnded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `StartRollout`: the work has really stopped, and its permit is free."""

    rollout: Rollout


class GroupProcessed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `ProcessGroup`."""

    result: GroupResult
    seconds: float = 0.0
    error: str | None = None
    """Set when the algorithm or its I/O failed; then the group trains nothing, and is counted."""


class BatchShipped(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `ShipBatch`: the batch is where the trainer will find it."""

    step: int
    bytes: int
    pack_s: float
    send_s: float
    digests: tuple[str, ...] = ()
    """Of each rank's file, in hex; empty in journals that did not say, and from sinks that have none."""


class StepTrained(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The trainer acknowledged a batch and says what it measured."""

    step: int
    metrics: dict[str, float]


class CheckpointSaved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `SaveCheckpoint`."""

    step: int
    seconds: float


class TimerFired(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers `WakeAt`."""


class RunHeld(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The shell cannot take more results for now: no rollout starts, and no model call is let through, until it says so
    again with an empty `why`. What runs goes on."""

    why: str = ""
    """What is waited for; empty when it goes on."""


class ShutdownRequested(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Someone asked the run to end: cancel what runs, save, finish. A second one changes nothing."""

    why: str


class RunFailed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The last word of a run, or of a life of it, that an error ended. Not for the core: there is nothing left to
    decide."""

    error: str


Event: TypeAlias = (
    RunOpened
    | EngineJoined
    | EngineLost
    | LoadReported
    | PolicyPublished
    | WeightsLoaded
    | TurnRequested
    | SegmentEnded
    | RolloutContinued
    | RolloutEnded
    | GroupProcessed
    | BatchShipped
    | StepTrained
    | CheckpointSaved
    | TimerFired
    | RunHeld
    | ShutdownRequested
    | RunFailed
)

Json: TypeAlias = dict[str, Any]
"""A JSON-like tree."""

__all__ = [
    "BatchShipped",
    "CheckpointSaved",
    "EngineJoined",
    "EngineLost",
    "Event",
    "GroupId",
    "GroupProcessed",
    "Json",
    "LoadReported",
    "PolicyPublished",
    "RolloutContinued",
    "RolloutEnded",
    "RunFailed",
    "RunHeld",
    "RunOpened",
    "SegmentEnded",
    "ShutdownRequested",
    "StepTrained",
    "TimerFired",
    "TurnRequested",
    "WeightsLoaded",
]
