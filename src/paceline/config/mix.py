"""How several environments share a run."""

from __future__ import annotations

from typing import Literal

from paceline.config.base import Section


class MixSection(Section):
    """What the environments' weights are shares of."""

    by: Literal["rollouts", "tokens", "draws"] = "rollouts"
    """`rollouts` or `tokens` that reach the trainer, held by feedback although environments fail, bring no signal or take
    longer; `draws` leaves it at how often each is drawn."""
