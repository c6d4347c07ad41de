"""What surrounds the core in a simulation, beside engines and workload: trainer, weights, faults."""

from __future__ import annotations

from math import inf, isfinite
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.domain.batch import Batch


class TrainerModel(Section):
    """How long an optimizer step takes. It trains one batch after the other."""

    step_s: float = Field(default=0.0, ge=0)
    """Seconds of a step, whatever it holds."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Tokens a second on top; none: a step takes `step_s`."""
    ship_s: float = Field(default=0.0, ge=0)
    """Seconds to pack and ship a batch."""
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds from the end of a step until its weights are published."""

    def seconds(self, batch: Batch) -> float:
        """Seconds to train it."""
        return self.step_s + (batch.tokens / self.tokens_per_s if self.tokens_per_s else 0.0)


class WeightsModel(Section):
    """How engines take new weights."""

    mode: Literal["keep", "recompute", "drain"] = "keep"
    """`keep` goes on with the KV of the old weights, `recompute` drops it and prefills anew, `drain` finishes what runs."""
    load_s: float = Field(default=0.0, ge=0)
    """Seconds an engine stands still for it."""


class FaultModel(Section):
    """What goes wrong. Each draw is keyed by what it is for, so that a rollout meets the same faults under every policy."""

    infrastructure: float = Field(default=0.0, ge=0, le=1)
    """Share of attempts that a sandbox or a network ends, at some turn."""
    environment: float = Field(default=0.0, ge=0, le=1)
    """Share of attempts that the environment's own code ends; they are not tried again."""
    call: float = Field(default=0.0, ge=0, le=1)
    """Share of engine requests that fail."""
    load: float = Field(default=0.0, ge=0, le=1)
    """Share of weight loads that fail."""
    engine_lost_at_s: tuple[Annotated[float, Field(allow_inf_nan=True)], ...] = ()
    """When an engine is lost: the first at the first of them, the second at the second, and so on."""
    engine_back_s: float = Field(default=inf, gt=0, allow_inf_nan=True)
    """Seconds until it is back, with the weights it started with; inf: it never is."""

    @model_validator(mode="after")
    def _times_come(self) -> FaultModel:
        for number, at in enumerate(self.engine_lost_at_s):
            if not (isfinite(at) and at >= 0):
                raise ValueError(
                    f"engine_lost_at_s[{number}] is {at:g}, and a run goes from 0 s on: give seconds that it comes to, or "
                    "leave out engines that are not lost"
                )
        return self

    @property
    def hits_rollouts(self) -> bool:
        """Whether any rollout may fail by itself."""
        return self.infrastructure > 0 or self.environment > 0
