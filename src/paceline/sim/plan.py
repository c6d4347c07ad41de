"""What one simulated rollout will do, and who decides it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from paceline.domain.commands import StartRollout
from paceline.domain.rollout import COMPLETED, Outcome


class RolloutPlan(msgspec.Struct, frozen=True, gc=False):
    """One rollout, unless it is cut short: a prompt, then turns."""

    prompt: int
    """Tokens of the first prompt that the members of its group share, behind the scaffold."""
    turns: tuple[tuple[float, int, int], ...]
    """(seconds outside the engine before it, tokens it observes then, tokens it samples) of each turn; the first observes
    none."""
    scaffold: int = 0
    """Tokens that all rollouts of its environment begin with."""
    start_s: float = 0.0
    """Seconds until its sandbox is up."""
    score_s: float = 0.0
    """Seconds to score it, after its last turn."""
    reward: float | None = 0.0
    outcome: Outcome = COMPLETED

    @property
    def sampled(self) -> int:
        """Tokens it samples in all."""
        return sum([tokens for _, _, tokens in self.turns])

    @property
    def context(self) -> int:
        """Tokens of its last context, with what it sampled."""
        return self.scaffold + self.prompt + sum([seen + sampled for _, seen, sampled in self.turns])


class Workload(Protocol):
    """Draws what rollouts do. The same command gives the same plan: what a task contributes depends on the task alone,
    what a member contributes on its noise seed, so two policies meet the same rollouts."""

    @property
    def longest(self) -> int:
        """Tokens of the longest context that a rollout may come to."""
        ...

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        """What the rollout that starts at `now` will do; `command.version` is the policy it starts with."""
        ...
