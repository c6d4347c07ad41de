"""The base of every config section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

FILE_NAME = r"^\w[\w.-]*$"
"""Of text that names files or directories: it stays where it is put, and is one word on a command line."""


class Section(BaseModel):
    """Frozen, strict about unknown keys, its numbers finite; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
