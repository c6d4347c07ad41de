"""Environments: what is trained on, what is held out, and within which limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.config.algorithm import AlgorithmSection
from paceline.config.base import Section
from paceline.config.model import SamplingOverride
from paceline.config.workers import InlineWorkers, WorkersSection

GATES = ("advantage", "reward", "solved")
"""Gates that come with Paceline."""

SAMPLERS = ("shuffled", "sequential", "difficulty", "band")
"""Samplers that come with Paceline."""


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


class GateSection(Section):
    """Judges an environment's groups once they are processed: whether they may train, and whether their task rests."""

    id: str
    """`advantage` (refuses groups whose advantages are all from `low` to `high`), `reward` (those whose mean reward is not
    from `low` to `high`), `solved` (rests tasks that reach `at_least`, `times` in a row, for `epochs`), or `module:Class`,
    your own."""
    name: str | None = None
    """Name in reasons and checkpoints; the id when left out. Must be unique in its environment."""
    args: dict[str, Any] = {}
    """Keyword arguments of the gate."""

    @field_validator("id")
    @classmethod
    def _gate_is_known(cls, name: str) -> str:
        if name not in GATES and ":" not in name:
            raise ValueError(f"expected one of {', '.join(GATES)}, or module:Class")
        return name

    @property
    def label(self) -> str:
        """The name it goes by."""
        return self.name or self.id


class EnvSection(Section):
    """One environment that is trained on."""

    id: str
    """Built-in name (`reverse-text`, `arithmetic`, `guess-number`, `store-search`; `data`, `reasoning-gym`, `textarena`, `textarena-selfplay`,
    `verifiers`, `openenv` with arguments of theirs) or `module:Class`."""
    name: str | None = None
    """Name in metrics and journals; the id when left out. Must be unique; `all` is reserved."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of what reaches the trainer (`mix.by`), relative to the other environments' weights."""
    draw_floor: float | None = Field(default=None, ge=0, le=1)
    """Least share of draws, from 0 to 1, whatever it brings; none takes a tenth of its share."""
    draw_ceiling: float | None = Field(default=None, gt=0, le=1)
    """Largest share of draws, which bounds what an environment costs that brings little; none goes half way from its
    share to all."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task that share a baseline."""
    sampler: str = "shuffled"
    """Which task is drawn: `shuffled` permutes each epoch anew by the run's seed; `sequential`; `difficulty` (pools by
    mean reward) and `band` (success rates) draw with replacement by how tasks went; or `module:Class`, your own."""
    sampler_args: dict[str, Any] = {}
    """Keyword arguments of a sampler that learns."""
    gates: tuple[GateSection, ...] = ()
    """What its groups must pass to train, once they are processed; all of them."""
    epochs: int | None = Field(default=None, ge=1)
    """Walks through a finite source before it is exhausted; none goes round for ever."""
    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Most rollouts started a minute: what a sandbox provider can bear. Never delays collection."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts at one member; a further one only after an `infrastructure` or `engine` failure."""
    quarantine_after: int | None = Field(default=2, ge=1)
    """Groups of one task, in a row, that must fail whole before the task is not drawn any more, while the environment
    works for others; none always draws it. For finite sources that are walked for ever (`epochs` none)."""
    workers: WorkersSection = InlineWorkers()
    """Where its code runs: `inline`, `process` or `ray`."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most rollouts of it in flight; none leaves it to admission. Other environments go on meanwhile."""
    cold_starts: int | None = Field(default=None, ge=1)
    """Most sandboxes set up at once (`self.cold_start()`), over all its workers; none sets no limit."""
    cold_starts_per_s: float | None = Field(default=None, gt=0)
    """Most sandboxes whose set-up begins in a second, over all its workers; none sets no limit."""
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
    observation_weight: float = Field(default=0.0, ge=0)
    """Weight of the log-likelihood of what the environment says after an answer (tool and user messages), beside the
    loss of the sampled tokens; 0 does not train it."""
    on_stale: Literal["drop", "train", "mask_tokens"] = "drop"
    """A rollout staler than `scheduling.max_staleness`: drop it, train it all the same (counted), or train
    only its tokens that are fresh enough."""

    @field_validator("sampler")
    @classmethod
    def _sampler_is_known(cls, name: str) -> str:
        if name not in SAMPLERS and ":" not in name:
            raise ValueError(f"expected one of {', '.join(SAMPLERS)}, or module:Class")
        return name

    @field_validator("gates")
    @classmethod
    def _gates_are_told_apart(cls, gates: tuple[GateSection, ...]) -> tuple[GateSection, ...]:
        names = [gate.label for gate in gates]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two gates are called {twice[0]!r}: give them names")
        return gates

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
    workers: WorkersSection = InlineWorkers()
    """Where its code runs: `inline`, `process` or `ray`."""
    cold_starts: int | None = Field(default=None, ge=1)
    """Most sandboxes set up at once (`self.cold_start()`), over all its workers; none sets no limit."""
    cold_starts_per_s: float | None = Field(default=None, gt=0)
    """Most sandboxes whose set-up begins in a second, over all its workers; none sets no limit."""
    limits: Limits = Limits()
    """Budgets of one rollout."""
    sampling: SamplingOverride = SamplingOverride()
    """What differs from `[sampling]` here."""

    @property
    def label(self) -> str:
        """The name it goes by."""
        return self.name or self.id
