"""What every config section has in common."""

from __future__ import annotations

from pydantic import BaseModel


class Section(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One table of the config file: frozen, no unknown key, and every field documented under itself.

    The docstring under a field is its description everywhere: `--help`, the reference, the JSON schema.
    """
