"""Rollouts: one run of the policy in an environment, and how it ended."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EngineId, RolloutId, Version
from paceline.domain.task import TaskRef

Ending: TypeAlias = Literal["completed", "truncated", "failed", "cancelled"]

Limit: TypeAlias = Literal["turns", "tokens", "context", "deadline"]
"""Which budget ended a truncated rollout."""

FailureCause: TypeAlias = Literal[
    "infrastructure", "environment", "engine", "empty", "unscored", "data", "restart"
]
"""Why a rollout failed. `infrastructure` and `engine` may be retried; `data` is a record the sink refused; `restart`:
the orchestrator ended while it ran, and its member is tried again."""

CancelCause: TypeAlias = Literal["stale", "overload", "surplus", "shutdown", "self", "discarded", "deferred"]
"""Why a rollout was cancelled. `self`: the environment raised the event loop's cancellation by itself. `discarded`: the
scheduling policy throws it away. `deferred`: the policy has the same response sampled again later."""

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why one model call stopped: a stop token or string, its token limit, or an abort that kept its tokens."""

VersionRuns: TypeAlias = tuple[tuple[Version, int], ...]
"""Run-length (version, tokens) over sampled tokens, in order; the counts add up to the tokens."""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a rollout ended: exactly one ending, with its cause where there is one."""

    ending: Ending
    cause: str | None = None
    """A `Limit` when truncated, a `FailureCause` when failed, a `CancelCause` when cancelled, else None."""
    detail: str = ""
    """For people: the error's type and text, or the limit in force."""


COMPLETED = Outcome("completed")


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One model call. Arrays are read-only; P prompt ids are new to this turn, S ids were sampled."""

    prompt_ids: NDArray[np.int32]
    """int32[P]. If `extends`, the ids added after everything so far; else the whole prompt of a new branch."""
    sampled_ids: NDArray[np.int32]
    """int32[S], exactly as the engine returned them, end token included if it was sampled."""
    logprobs: NDArray[np.float32]
    """float32[S], natural log, of the distribution that was sampled from (after temperature)."""
    versions: VersionRuns
    """Which version sampled which of the S ids."""
    extends: bool
    """True when this prompt is the previous turn's prompt and sampled ids followed by `prompt_ids`."""
    finish: Finish
    engine: EngineId = ""
    cached_tokens: int = 0
    """Prompt tokens whose KV the engine already had."""
    queued_s: float = 0.0
    """Seconds between asking for the turn and the engine request."""
    started: float = 0.0
    """When the first engine request was sent, in seconds of the run's clock."""
    ended: float = 0.0
    segments: int = 1
    """Engine requests that made this turn."""
    after: int = -1
    """Number of the turn that this one extends, where that is not the turn before: the rollout went back, or goes on
    in several branches. Read only if `extends`; -1 is the turn before."""
    roles: tuple[tuple[str, int], ...] = ()
    """Run-length (role, tokens) over the P ids: whose words they are. The template's markup has the role "". Empty
    when that is not known."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of the conversation, for people and for scorers."""

    role: str
    content: str


class Rollout(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The terminal record of one rollout. There is exactly one for every rollout launched."""

    id: RolloutId
    task: TaskRef
    outcome: Outcome
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    """None when nobody scored it; such a rollout neither votes nor trains."""
    rewards: dict[str, float] = {}
    """Named parts of the reward."""
    metrics: dict[str, float] = {}
    """Named numbers of the environment that do not move the reward."""
    temperature: float = 1.0
    started: float = 0.0
    ended: float = 0.0
    model_s: float = 0.0
    """Seconds spent in model calls, waiting at the turn gate not included."""
    gate_s: float = 0.0
    """Seconds spent waiting at the turn gate."""
    messages: tuple[Message, ...] = ()
    turn_rewards: tuple[float, ...] | None = None
    """What each turn earned of the reward, one number a turn; None where the reward belongs to the whole rollout."""
    role: str = ""
    """Which of several agents it was; members of a group are compared with those of their role alone."""
    trains: bool = True
    """False for an agent that was only played against: it neither votes nor trains."""
    info: dict[str, Any] = {}
    """Small JSON-like facts for people: never read by a decision."""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.prompt_ids) for turn in self.turns)

    @property
    def env_s(self) -> float:
        """Seconds in the environment: everything that was neither a model call nor the gate."""
        return max(0.0, self.ended - self.started - self.model_s - self.gate_s)

    @property
    def oldest_version(self) -> Version | None:
        """Oldest version that sampled any token here; None when nothing was sampled."""
        return min((v for turn in self.turns for v, n in turn.versions if n), default=None)

    @property
    def newest_version(self) -> Version | None:
        return max((v for turn in self.turns for v, n in turn.versions if n), default=None)
