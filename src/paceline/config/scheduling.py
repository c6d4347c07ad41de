"""How far generation may run ahead of training, and how many rollouts may run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section


class OverlapScheduling(Section):
    """Generate the next batch while the last one trains, within a bounded lag."""

    type: Literal["overlap"] = "overlap"
    """Which scheduling policy."""
    lag: int = Field(default=1, ge=0)
    """Optimizer steps that generation may run ahead; 0 is strictly on-policy."""
    max_staleness: int = Field(default=4, ge=0)
    """Most optimizer steps between the version a batch trains and the oldest that sampled a rollout in it."""

    @model_validator(mode="after")
    def _bound_covers_the_lag(self) -> Self:
        if self.max_staleness < self.lag:
            raise ValueError(
                f"max_staleness {self.max_staleness} < lag {self.lag}: a rollout started {self.lag} steps ahead "
                "is that stale when it trains; raise max_staleness or lower lag"
            )
        return self


SchedulingSection = Annotated[OverlapScheduling, Field()]


class FixedAdmission(Section):
    """A fixed number of rollouts in flight on each engine."""

    type: Literal["fixed"] = "fixed"
    """Which admission controller."""
    cap: int = Field(default=64, ge=1)
    """Rollouts in flight on each engine, train and eval together."""
    eval_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the cap that evals may take while training also wants it."""


AdmissionSection = Annotated[FixedAdmission, Field()]
