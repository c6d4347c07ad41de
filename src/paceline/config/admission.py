"""How many rollouts may run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section


class FixedAdmission(Section):
    """A fixed number of rollouts in flight on each engine."""

    type: Literal["fixed"] = "fixed"
    """Which admission controller."""
    cap: int = Field(default=64, ge=1)
    """Rollouts in flight on each engine, train and eval together."""
    eval_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the cap that evals may take while training also wants it."""

    @property
    def park(self) -> bool:
        """A fixed cap takes nothing off."""
        return True

    @property
    def most(self) -> int:
        """Rollouts that an engine may hold at most."""
        return self.cap


class _GuidedAdmission(Section):
    """What the controllers that follow the load have in common."""

    min_inflight: int = Field(default=1, ge=1)
    """Rollouts an engine may always hold; at least one group where an environment scores groups whole."""
    max_inflight: int = Field(default=1024, ge=1)
    """Rollouts an engine may hold at most: what sandboxes and connections can take."""
    initial_inflight: int | None = Field(default=None, ge=1)
    """Rollouts it may hold at first; none: KV-cache capacity over longest context, or what a resumed run had."""
    eval_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the cap that evals may take while training also wants it."""
    park: bool = True
    """Park the youngest rollouts under overload: they keep their tokens and go on later. Off cancels them."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_inflight > self.max_inflight:
            raise ValueError(
                f"min_inflight {self.min_inflight} > max_inflight {self.max_inflight}: lower min_inflight"
            )
        return self

    @property
    def most(self) -> int:
        """Rollouts that an engine may hold at most."""
        return self.max_inflight


class AdaptiveAdmission(_GuidedAdmission):
    """Grown by turnover, trimmed and cut by the engine's metrics: the controller published with prime-rl, for each
    engine. Its thresholds are the published ones and no options."""

    type: Literal["adaptive"]
    """Which admission controller."""


class PredictiveAdmission(_GuidedAdmission):
    """The number of rollouts at which a model of each engine, learnt while it runs, yields most."""

    type: Literal["predictive"]
    """Which admission controller."""
    risk: float = Field(default=1.0, ge=0)
    """Standard deviations of the contexts' sum that the choice allows for, besides what the forecast watches; more is
    safer and leaves more of the KV cache empty."""


AdmissionSection = Annotated[
    FixedAdmission | AdaptiveAdmission | PredictiveAdmission, Field(discriminator="type")
]
