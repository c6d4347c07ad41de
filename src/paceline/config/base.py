"""The base of every config section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, strict about unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FiniteSection(Section):
    """One whose numbers are all finite: a simulation of infinitely long steps would never end."""

    model_config = ConfigDict(allow_inf_nan=False)
