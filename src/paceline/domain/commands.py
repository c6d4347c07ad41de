"""Commands: what the core wants done. A shell performs them and answers with events.

Every command carries the reason for it, in words, for the journal, `explain` and the dashboard.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from paceline.domain.batch import Batch
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import CancelCause
from paceline.domain.task import TaskRef


class StartRollout(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Run one rollout. Answered by exactly one `RolloutEnded`, however it ends."""

    rollout: RolloutId
    task: TaskRef
    group_seed: int
    """Shared by the members of a group: the initial state of the environment."""
    noise_seed: int
    """Keys the sampling noise of this member; a retry keeps it."""
    engine: EngineId
    """Where its turns should go."""
    version: Version
    """Policy version when it was started, for display and for `start together`; tokens carry their own."""
    reason: str = ""
    group_size: int = 0
    """Members of its group; 0 in journals that did not say."""
    group_needs: int = 0
    """Members that make its group whole, where they race; 0: all."""
    put_off: int = 0
    """Number of the `PutOff` that its group comes from; 0 for a task that was drawn."""


class ContinueRollout(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Go on with a rollout that an earlier life of the run left under way. Answered by exactly one `RolloutEnded`, and
    before it by a `RolloutContinued`, unless it is cancelled before it has begun."""

    rollout: RolloutId
    task: TaskRef
    group_seed: int
    noise_seed: int
    engine: EngineId
    """Where its turns should go; empty for one that is cancelled at once."""
    version: Version
    started: float
    """When it was first started, in seconds of the run's clock: its deadline counts from there, `stood_s` left out."""
    tokens: int
    """Sampled so far, by the journal."""
    requests: int
    """Engine requests that sampled them."""
    reason: str = ""
    stood_s: float = 0.0
    """Seconds since then that it stood still: a life of the run had found it under way, and it waited to go on."""


class GrantTurn(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Let a waiting rollout call an engine, once. Answered by exactly one `SegmentEnded`."""

    rollout: RolloutId
    engine: EngineId
    version: Version
    """What the engine holds now: salts its prefix cache."""
    max_tokens: int | None = None
    """Tokens this request may sample; the call asks again for the rest. None sets no limit."""


class CancelRollout(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Stop a rollout. Not answered by itself: it makes its `RolloutEnded` come sooner."""

    rollout: RolloutId
    cause: CancelCause
    reason: str = ""


class ParkRollout(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Take a rollout off its engine: abort the request under way, keep its tokens. Not answered by itself: it makes a
    `SegmentEnded` come sooner, and the rollout's next request waits until it is resumed."""

    rollout: RolloutId
    reason: str = ""


class ResumeRollout(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A parked rollout may go on: the gate will let it through. Nothing to perform, and not answered."""

    rollout: RolloutId
    reason: str = ""


class NoteCap(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine's cap has changed, or the reason for it. Nothing to perform, and not answered."""

    engine: EngineId
    cap: int
    reason: str = ""


class NoteDead(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Groups of an environment in a row brought nothing to train. Nothing to perform, and not answered."""

    env: EnvName
    groups: int
    """How many of its groups, in a row; 0 when one of them trains again."""
    reason: str
    """Of how many groups, why, what to change, and whether the run is going to end for it."""


class NoteOutage(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An environment is out, still out after a probe, or back. Nothing to perform, and not answered."""

    env: EnvName
    out: bool
    reason: str


class NoteQuarantine(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A task is not drawn any more. Nothing to perform, and not answered."""

    env: EnvName
    index: int
    reason: str


class NoteOpened(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A group was opened whose members do not start at once: they wait for a seat, or for room for all of them. One that
    starts as it is opened is told of by its `StartRollout`s. Nothing to perform, and not answered."""

    group: GroupId
    task: TaskRef
    size: int
    group_seed: int
    needs: int = 0
    """Members that make it whole; 0: all of them."""
    put_off: int = 0
    """Number of the `PutOff` that it comes from; 0 for a task that was drawn."""


class NoteRedraw(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The end of the run has cut a group short that could bring nothing: a resumed run begins it again. Nothing to perform, and
    not answered."""

    task: TaskRef
    put_off: int = 0
    """Number of the `PutOff` that it came from, which is kept again; 0: its task is drawn again."""


class SkipTask(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A task came next, and was passed over: it rests, or is in quarantine. Nothing to perform, and not answered."""

    task: TaskRef


class ProcessGroup(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Turn a closed group into samples with advantages, off the loop. Answered by `GroupProcessed`."""

    group: ClosedGroup
    reason: str = ""


class UpdateWeights(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Pause one engine, load `version` from `path`, resume. Answered by `WeightsLoaded`."""

    engine: EngineId
    version: Version
    path: str
    reason: str = ""


class ReviveEngine(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Get an engine back that is not used any more: restart it, or wait until it answers. Answered by
    `EngineJoined` if it comes back, else not at all."""

    engine: EngineId
    reason: str = ""


class ShipBatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Pack a batch and put it where the trainer reads. Answered by `BatchShipped`."""

    batch: Batch
    reason: str = ""


class SaveCheckpoint(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Write the core's own state durably. Answered by `CheckpointSaved`."""

    step: int
    state: dict[str, Any]
    """What `Core.restore` takes; msgpack-able."""
    reason: str = ""


class WakeAt(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Send `TimerFired` at `at`, in seconds of the run's clock. A later one does not cancel an earlier."""

    at: float
    reason: str = ""


class ReportEval(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An eval epoch is complete. Not answered."""

    env: EnvName
    version: Version
    """The version the epoch was opened for."""
    newest_version: Version
    """The newest version that sampled in it; evals do not stop training."""
    rollouts: int
    scored: int
    mean_reward: float | None
    """`avg@k`: over the scored rollouts; None when there were none."""
    pass_at: dict[int, float] = {}
    """Unbiased `pass@j` for powers of two up to k; empty when rewards are not binary."""
    by_ending: dict[str, int] = {}
    mean_tokens: float = 0.0
    reason: str = ""


class NoteRetry(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The attempt that just ended is not its member's last: another waits for a permit. Not answered."""

    rollout: RolloutId
    """The attempt that ended."""
    reason: str = ""


class NoteStale(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A rollout that waited for its batch became staler than the bound. Not answered."""

    rollout: RolloutId
    action: Literal["dropped", "trained", "masked"]
    tokens: int
    """Trainable tokens concerned."""
    reason: str = ""


class NoteDiscarded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A rollout that waited for its batch was thrown away by the scheduling policy, or refused by a gate. Not answered."""

    rollout: RolloutId
    tokens: int
    """Its trainable tokens."""
    reason: str = ""


class PutOff(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The scheduling policy keeps rollouts of a task for later: they start as a group of their own, whose
    `StartRollout`s name this number. Nothing to perform, and not answered."""

    number: int
    """Counted from 1 over the run."""
    task: TaskRef
    size: int
    group_seed: int | None = None
    """The initial state they must start from; None for a new one."""
    noise: tuple[int, ...] = ()
    """The noise seed of each member; empty for new ones."""
    again: tuple[RolloutId, ...] = ()
    """The rollouts whose responses they sample again, where noise is kept."""
    references: tuple[float, ...] = ()
    """Rewards of siblings that ended before, for their baseline."""
    reason: str = ""


class NoteLengths(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What the scheduling policy has learnt of an environment's lengths, and how its predictions did. Not answered."""

    env: EnvName
    ended: int
    """Rollouts that it learnt from."""
    median: float
    """Tokens."""
    deviation: float
    """Standard deviation of ln(tokens)."""
    group_share: float
    """Share of that variance that a group has in common."""
    runaways: float
    """Share of rollouts that go to their limit."""
    p90: float
    """Tokens that nine of ten do not pass."""
    judged: int = 0
    """Rollouts compared with what was predicted when they began, or when their last sibling ended."""
    mean_rank: float | None = None
    """Of them in their predictions: 0.5 when these are neither too long nor too short."""
    inside_half: float | None = None
    """Share within the middle half of the prediction."""
    inside_90: float | None = None
    """Share within the middle 90%."""


class SplitGroup(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Rollouts of an open group that go on later leave it for a group of their own, so that it can close without them.
    They keep their ids. Nothing to perform, and not answered."""

    group: GroupId
    rest: GroupId
    """The group that they are members of from here on."""
    rollouts: tuple[RolloutId, ...]
    reason: str = ""


class NoteLate(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A response is beyond the cut-off of its round: it is held, and goes on as late in a later one, over a restart too.
    Nothing to perform, and not answered."""

    rollout: RolloutId
    reason: str = ""


class NoteReferences(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What the members of an open group will be compared with instead of each other. Nothing to perform, and not
    answered."""

    group: GroupId
    references: tuple[float, ...]
    """Rewards of siblings that ended before, or one that stands for them."""
    reason: str = ""


class ForgetGroup(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Nothing refers to this group any more; sessions and caches keyed by it may go. Not answered."""

    group: GroupId
    reason: str = ""


class FinishRun(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The last command: everything has settled."""

    status: Literal["done", "stopped", "failed"]
    reason: str


Command: TypeAlias = (
    StartRollout
    | ContinueRollout
    | GrantTurn
    | CancelRollout
    | ParkRollout
    | ResumeRollout
    | NoteCap
    | NoteDead
    | NoteOutage
    | NoteQuarantine
    | NoteOpened
    | NoteRedraw
    | SkipTask
    | ProcessGroup
    | UpdateWeights
    | ReviveEngine
    | ShipBatch
    | SaveCheckpoint
    | WakeAt
    | ReportEval
    | NoteRetry
    | NoteStale
    | NoteDiscarded
    | PutOff
    | NoteLengths
    | SplitGroup
    | NoteLate
    | NoteReferences
    | ForgetGroup
    | FinishRun
)

NOTES: Final[frozenset[type]] = frozenset(
    {
        ResumeRollout,
        NoteCap,
        NoteDead,
        NoteOutage,
        NoteQuarantine,
        NoteOpened,
        NoteRedraw,
        SkipTask,
        ReportEval,
        NoteRetry,
        NoteStale,
        NoteDiscarded,
        PutOff,
        NoteLengths,
        SplitGroup,
        NoteLate,
        NoteReferences,
        ForgetGroup,
    }
)
"""Commands that say something and have nothing performed: the journal, recovery and the folds over it read them."""
