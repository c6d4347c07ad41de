"""What is done about rollouts that do not end together: one section a policy."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from paceline.config.base import Section

_T = TypeVar("_T", bound=Section)


class _Scheduling(Section):
    """What all policies have in common."""

    segment_tokens: int | None = Field(default=None, ge=1)
    """Tokens one engine request may sample before it asks the turn gate again, with the same ids; none: no limit."""

    @property
    def lag(self) -> int:
        """Optimizer steps that generation may run ahead."""
        return 0

    @property
    def staleness_bound(self) -> int:
        """Most steps between the version a batch trains and the oldest that sampled a rollout in it."""
        return 0


class OverlapScheduling(Section):
    """Generate the next batch while the last one trains, within a bounded lag."""

    type: Literal["overlap"] = "overlap"
    """Which scheduling policy."""
    lag: int = Field(default=1, ge=0)
    """Optimizer steps that generation may run ahead; 0 is strictly on-policy."""
    max_staleness: int = Field(default=4, ge=0)
    """Most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it."""
    segment_tokens: int | None = Field(default=None, ge=1)
    """Tokens one engine request may sample before it asks the turn gate again, with the same ids; none: no limit."""

    @model_validator(mode="after")
    def _bound_covers_the_lag(self) -> Self:
        return _covers(self, self.max_staleness, self.lag)

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness


class SynchronousScheduling(_Scheduling):
    """One batch at a time: wait for all of it, train, and only then begin the next."""

    type: Literal["synchronous"]
    """Which scheduling policy."""


class OverprovisionScheduling(_Scheduling):
    """Start more rollouts than a batch needs; the first to finish are the batch."""

    type: Literal["overprovision"]
    """Which scheduling policy."""
    factor: float = Field(default=1.25, gt=1)
    """Rollouts in a round, in batches."""
    late: Literal["keep", "discard"] = "keep"
    """Late ones train in the next batch, or are thrown away: then training sees shorter rollouts than the policy makes."""
    max_staleness: int = Field(default=4, ge=1)
    """Most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it; 0 with `late =
    "discard"`, whatever is said here."""

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness if self.late == "keep" else 0


class PartialScheduling(_Scheduling):
    """A token budget for each rollout and round; what is unfinished goes on in the next round."""

    type: Literal["partial"]
    """Which scheduling policy."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a rollout may sample in one round (Kimi k1.5); none: it runs until the batch is full."""
    over_issue: float = Field(default=1.0, ge=1)
    """Fresh rollouts of a round, in batches; without a budget, together with those that go on (APRIL)."""
    max_staleness: int = Field(default=8, ge=1)
    """Most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it."""

    @model_validator(mode="after")
    def _something_is_partial(self) -> Self:
        if self.budget_tokens is None and self.over_issue == 1:
            raise ValueError(
                "budget_tokens is not set and over_issue is 1: nothing would ever be unfinished; set one of them"
            )
        return self

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness


class TailRoundsScheduling(_Scheduling):
    """Race in short rounds, and run the tasks that lose anew in long ones (RollPacker). Trains on rollouts that are
    shorter than what the policy makes."""

    type: Literal["tail_rounds"]
    """Which scheduling policy."""
    prompts: float = Field(default=1.25, ge=1)
    """Tasks of a short round, in batches."""
    responses: float = Field(default=1.25, ge=1)
    """Rollouts of a task in a short round, in group sizes."""


class UnbiasedTailScheduling(_Scheduling):
    """Put each response off that is longer than a cut-off chosen beforehand, and have the same response back later."""

    type: Literal["unbiased_tail"]
    """Which scheduling policy."""
    cutoff_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a rollout beyond which it is put off; none learns the cut-off that costs least time, for each environment."""
    late: Literal["auto", "pinned", "resume"] = "auto"
    """How a response comes back: sampled again with the same noise, where the engine's noise goes by (seed, position), or
    resumed with the tokens it has; `auto` takes the first that the engine can do."""
    max_staleness: int = Field(default=32, ge=1)
    """With `resume`, most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it;
    without, nothing is stale."""

    @property
    def staleness_bound(self) -> int:
        return 0 if self.late == "pinned" else self.max_staleness


class _OrderedScheduling(Section):
    """What the policies that choose anew at every request have in common."""

    lag: int = Field(default=0, ge=0)
    """Optimizer steps that generation may run ahead; 0 is strictly on-policy."""
    max_staleness: int = Field(default=4, ge=0)
    """Most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it."""
    move_gap: float = Field(default=0.25, ge=0)
    """Share of a KV cache by which another engine must be emptier for a rollout to move there: its context is then computed
    again."""

    @model_validator(mode="after")
    def _bound_covers_the_lag(self) -> Self:
        return _covers(self, self.max_staleness, self.lag)

    @property
    def segment_tokens(self) -> int | None:
        """Of evals: they are not cut."""
        return None

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness


class DividedScheduling(_OrderedScheduling):
    """Short requests; the first of each group, then the longest groups (Seer)."""

    type: Literal["divided"]
    """Which scheduling policy."""
    chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens of one engine request; at its end the rollout may give way to another, or move to another engine."""
    order: Literal["longest", "arrival"] = "longest"
    """Who comes first: probes, then the longest groups by what has ended of them (`longest`), or the oldest groups, as they
    were drawn (`arrival`): requests are divided and placed anew all the same, and nothing is learnt of lengths."""


class KvAreaScheduling(_OrderedScheduling):
    """Short requests; what may end last first, else the shortest, by learnt lengths."""

    type: Literal["kv_area"]
    """Which scheduling policy."""
    chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens of one engine request; at its end the rollout may give way to another, or move to another engine."""
    critical: float = Field(default=0.4, gt=0)
    """A rollout goes first when this share of the time that is left may remain of it: does, for one in twenty like it."""
    fill: float = Field(default=0.75, gt=0, le=1)
    """Share of the KV caches that is taken to be full on average, to reckon the time that is left."""


SchedulingSection = Annotated[
    OverlapScheduling
    | SynchronousScheduling
    | OverprovisionScheduling
    | PartialScheduling
    | TailRoundsScheduling
    | DividedScheduling
    | UnbiasedTailScheduling
    | KvAreaScheduling,
    Field(discriminator="type"),
]


def _covers(section: _T, bound: int, lag: int) -> _T:
    if bound < lag:
        raise ValueError(
            f"max_staleness {bound} < lag {lag}: a rollout started {lag} steps ahead is that stale when it trains; "
            "raise max_staleness or lower lag"
        )
    return section
