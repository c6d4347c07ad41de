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


SchedulingSection = Annotated[
    OverlapScheduling | SynchronousScheduling | OverprovisionScheduling, Field(discriminator="type")
]


def _covers(section: _T, bound: int, lag: int) -> _T:
    if bound < lag:
        raise ValueError(
            f"max_staleness {bound} < lag {lag}: a rollout started {lag} steps ahead is that stale when it trains; "
            "raise max_staleness or lower lag"
        )
    return section
