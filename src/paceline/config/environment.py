"""Environments: what is trained on, what is held out, and within which limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.config.algorithm import AlgorithmSection
from paceline.config.base import Section
from paceline.config.model import SamplingOverride


class Limits(Section):
    """Budgets of one rollout. Reaching one is a truncation, not an error."""

    max_turns: int | None = Field(default=None, ge=1)
    """Most model calls of one rollout; none leaves it to the environment."""
    max_rollout_tokens: int | None = Field(default=None, ge=1)
    """Most sampled tokens of one rollout, over all its turns."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest context in tokens; none takes the engine's."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Wall-clock seconds after which a rollout is truncated (limit `deadline`)."""
    score_s: float = Field(default=60.0, gt=0)
    """Seconds the environment may take to score and close a rollout whose deadline has passed."""


class EnvSection(Section):
    """One environment that is trained on."""

    id: str
    """Built-in name (`reverse-text`, `arithmetic`, `guess-number`) or `module:Class`."""
    name: str | None = None
    """Name in metrics and journals; the id when left out. Must be unique; `all` is reserved."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    weight: float = Field(default=1.0, gt=0)
    """Share of groups drawn from it, relative to the other environments' weights."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task that share a baseline."""
    sampler: Literal["shuffled", "sequential"] = "shuffled"
    """Order in which tasks are drawn; `shuffled` permutes each epoch anew by the run's seed."""
    epochs: int | None = Field(default=None, ge=1)
    """Walks through a finite source before it is exhausted; none goes round for ever."""
    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Most rollouts started a minute: what a sandbox provider can bear. Never delays collection."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts at one member; a further one only after an `infrastructure` or `engine` failure."""
    limits: Limits = Limits()
    """Budgets of one rollout."""
    sampling: SamplingOverride = SamplingOverride()
    """What differs from `[sampling]` here."""
    algorithm: AlgorithmSection | None = None
    """What differs from `[algorithm]` here; none takes that one."""
    truncated_votes: bool = True
    """Whether truncated rollouts that were scored count in the group's baseline."""
    truncated_trains: bool = True
    """Whether truncated rollouts that were scored are trained on."""
    all_or_nothing: bool | None = None
    """Drop the whole group when a member has no score; none asks the environment (group scorers need it)."""
    on_stale: Literal["drop", "train", "mask_tokens"] = "drop"
    """A rollout staler than `scheduling.max_staleness`: drop it, train it all the same (counted), or train
    only its tokens that are fresh enough."""

    @property
    def label(self) -> str:
        """The name it goes by."""
        return self.name or self.id


class EvalSection(Section):
    """A held-out measurement, interleaved with training."""

    id: str
    """Built-in name or `module:Class`, as for a training environment."""
    name: str | None = None
    """Name in metrics; the id when left out."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    examples: int = Field(default=64, ge=1)
    """Tasks of the eval split, the first of it."""
    k: int = Field(default=1, ge=1)
    """Rollouts of each task: `avg@k`, and `pass@j` for j up to k."""
    every: int = Field(default=10, ge=1)
    """Measure when the engines hold a version that is a multiple of this."""
    at_start: bool = True
    """Measure v0 before anything was trained."""
    at_end: bool = True
    """Measure the last version, whatever `every` says."""
    limits: Limits = Limits()
    """Budgets of one rollout."""
    sampling: SamplingOverride = SamplingOverride()
    """What differs from `[sampling]` here."""

    @property
    def label(self) -> str:
        """The name it goes by."""
        return self.name or self.id
