"""How rewards of a group become advantages."""

from __future__ import annotations

from typing import Any

from paceline.config.base import Section


class AlgorithmSection(Section):
    """The advantage estimator."""

    name: str = "grpo"
    """`grpo`, `grpo_std`, `dr_grpo`, `rloo`, `turn_grpo`, or `module:Class` for your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the algorithm."""
