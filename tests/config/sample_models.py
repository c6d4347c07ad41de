"""A small config tree with one of everything that the real one may contain."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.config.base import Section


class Kind(Enum):
    FAST = "fast"
    SAFE = "safe"


class Fixed(Section):
    """A constant cap."""

    type: Literal["fixed"] = "fixed"
    """Which controller."""
    cap: int = Field(default=64, ge=1)
    """Rollouts in flight."""
    eval_share: float = 0.25
    """Share of the cap."""


class Adaptive(Section):
    """Grow, trim, cut."""

    type: Literal["adaptive"] = "adaptive"
    """Which controller."""
    floor: int = Field(default=8, ge=1)
    """Rollouts always allowed."""
    ceiling: int | None = Field(default=1024, ge=1)
    """Most rollouts."""
    eval_share: float = 0.25
    """Share of the cap."""

    @model_validator(mode="after")
    def _floor_is_below_ceiling(self) -> Self:
        if self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor {self.floor} > ceiling {self.ceiling}: lower floor to fit")
        return self


Admission = Annotated[Fixed | Adaptive, Field(discriminator="type")]


class Limits(Section):
    """Budgets of one rollout."""

    max_turns: int | None = Field(default=None, ge=1)
    """Model calls."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds."""


class Env(Section):
    """One environment."""

    id: str
    """Its name."""
    weight: float = Field(default=1.0, gt=0)
    """Share of groups."""
    stop: tuple[str, ...] | None = None
    """Strings that end a call."""
    args: dict[str, Any] = {}  # noqa: RUF012
    """Passed to it."""
    limits: Limits = Limits()
    """Its budgets."""
    admission: Admission | None = None
    """Its own controller."""


class Orchestrator(Section):
    """What is collected."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts a step."""
    on_stale: Literal["drop", "train"] = "drop"
    """What becomes of old rollouts."""
    shuffle: bool = True
    """Whether tasks are permuted."""
    system: str | None = None
    """System prompt."""
    limits: Limits = Limits(max_turns=5)
    """Budgets."""


class Config(Section):
    """Everything."""

    seed: int = 0
    """Seeds everything."""
    out: Path = Path("runs")
    """Where to."""
    kind: Kind = Kind.SAFE
    """How."""
    port: int | str = 80
    """A number or a socket name."""
    level: Literal[0, 1, "auto"] = "auto"
    """How much."""
    buckets: tuple[int, ...] = (1, 2)
    """Sizes."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of Adam."""
    prompt_or_none: str | None = "hello"
    """Optional, though not none by default."""
    anything: Any = None
    """Whatever."""
    scores: dict[str, int | None] = {}  # noqa: RUF012
    """By name."""
    orchestrator: Orchestrator = Orchestrator(batch_size=16)
    """What is collected."""
    admission: Admission = Adaptive(floor=4)
    """How many run."""
    per_site: dict[str, Limits] = {}  # noqa: RUF012
    """Budgets by site."""
    env: tuple[Env, ...] = ()
    """Environments."""
    tracker: Fixed | None = None
    """Off unless there."""
    size_bytes: int = 1024
    """Also as `"4k"`."""

    @field_validator("size_bytes", mode="before")
    @classmethod
    def _read_unit(cls, value: object) -> object:
        return int(value[:-1]) * 1024 if isinstance(value, str) and value.endswith("k") else value

    @model_validator(mode="after")
    def _batch_covers_environments(self) -> Self:
        if self.orchestrator.batch_size < len(self.env):
            raise ValueError(f"orchestrator.batch_size is less than the {len(self.env)} environments")
        return self
