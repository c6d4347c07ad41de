"""Where an environment's code runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section


class InlineWorkers(Section):
    """In the orchestrator's own event loop."""

    type: Literal["inline"] = "inline"
    """Where the environment runs."""


class _Pool(Section):
    """What every pool of workers has."""

    count: int = Field(default=1, ge=1)
    """Workers."""
    rollouts: int = Field(default=4096, ge=1)
    """Most rollouts of one worker at once; what is beyond waits until one has room."""
    start_s: float = Field(default=120.0, gt=0)
    """Seconds a worker may take to import its environment, make it, and say that it is ready."""
    hang_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life of a worker's event loop before it is killed; blocking code is one."""
    recycle_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts after which a worker is drained and replaced; none never does."""
    recycle_s: float | None = Field(default=None, gt=0)
    """Seconds after which a worker is drained and replaced; none never does."""
    recycle_mb: int | None = Field(default=None, ge=1)
    """MB of resident memory above which a worker is drained and replaced; none never does."""


class ProcessWorkers(_Pool):
    """In processes of this machine."""

    type: Literal["process"] = "process"
    """Where the environment runs."""
    python: str | None = None
    """Interpreter of the environment (Python 3.11 or newer, with msgspec, numpy and pydantic); none takes our own."""
    memory_mb: int | None = Field(default=None, ge=64)
    """MB of private memory that Linux lets one worker have (RLIMIT_DATA); what asks for more gets MemoryError."""

    @model_validator(mode="after")
    def _recycled_before_refused(self) -> Self:
        if self.memory_mb is not None and self.recycle_mb is not None and self.recycle_mb >= self.memory_mb:
            raise ValueError(
                f"recycle_mb {self.recycle_mb} >= memory_mb {self.memory_mb}: a worker would be refused memory before "
                "it is replaced; lower recycle_mb"
            )
        return self


class RayWorkers(_Pool):
    """In Ray actors, across hosts."""

    type: Literal["ray"] = "ray"
    """Where the environment runs."""
    address: str | None = None
    """Cluster to join, as `ray.init` takes it (`auto`, `host:6379`); none starts one on this machine."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that one actor occupies."""
    resources: dict[str, float] = {}
    """Custom resources that one actor occupies, by name: sandbox slots, say."""
    memory_mb: int | None = Field(default=None, ge=64)
    """MB of memory that Ray sets aside for one actor when it places it; none sets none aside."""


WorkersSection = Annotated[InlineWorkers | ProcessWorkers | RayWorkers, Field(discriminator="type")]
"""Where an environment's code runs."""
