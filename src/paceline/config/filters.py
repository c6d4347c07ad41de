"""Which rollouts are kept out of training, and why."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.base import Section


class RepetitionFilter(Section):
    """Detects a rollout that loops: long stretches made of one short period."""

    type: Literal["repetition"]
    """Which filter."""
    enforce: bool = True
    """Drop what it detects; false only counts it."""
    window: int = Field(default=64, ge=4)
    """Sampled tokens looked at, ending anywhere."""
    max_period: int = Field(default=16, ge=1)
    """Longest period that counts as a loop, in tokens."""


class GibberishFilter(Section):
    """Detects a rollout whose tokens the policy itself found very unlikely."""

    type: Literal["gibberish"]
    """Which filter."""
    enforce: bool = True
    """Drop what it detects; false only counts it."""
    window: int = Field(default=32, ge=1)
    """Sampled tokens the mean is taken over."""
    logprob: float = Field(default=-8.0, lt=0)
    """A window whose mean logprob is below this is gibberish (natural log)."""


class LengthFilter(Section):
    """Detects a rollout with too few or too many sampled tokens."""

    type: Literal["length"]
    """Which filter."""
    enforce: bool = True
    """Drop what it detects; false only counts it."""
    min_tokens: int = Field(default=1, ge=0)
    """Fewest sampled tokens allowed."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most sampled tokens allowed."""


PreFilter = Annotated[RepetitionFilter | GibberishFilter | LengthFilter, Field(discriminator="type")]


class FiltersSection(Section):
    """Pre-filters see a scored rollout, post-filters its advantages; both work on whole rollouts."""

    pre: tuple[PreFilter, ...] = ()
    """Applied after scoring, in order."""
    filtered_vote: bool = True
    """Whether a rollout that a pre-filter drops still counts in its group's baseline."""
    zero_advantage: bool = True
    """Keep rollouts without signal out of the batch; others take their place, so the batch stays full."""
    zero_advantage_threshold: float = Field(default=0.0, ge=0)
    """Largest absolute advantage that counts as none."""
