"""What one simulated rollout will do, and who decides it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from paceline.domain.commands import StartRollout
from paceline.domain.rollout import COMPLETED, Outcome


class Start(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Where a turn begins that does not go on from the turn before: with a prompt of its own, or from an earlier turn."""

    kept: int = 0
    """Tokens of an earlier context that its own begins with; what the turn observes comes behind them."""
    after: int = -1
    """Number of the turn whose whole context is kept; -1: none is, and samples of the rollout begin anew here."""
    conversation: int = 0
    """Which of the rollout's it belongs to. 0 is that of the first turn, and has its prompt whole; any other begins with the
    first turn that names it, and shares nothing with siblings. Turns behind this one belong to it until another says."""
    found: int = 0
    """Tokens of `kept` that the last context of the conversation begins with, too: what an engine may have cached."""


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
    starts: tuple[Start | None, ...] = ()
    """Of each turn; None where it goes on from the turn before, as the first does from the prompt. Empty: all do."""

    @property
    def sampled(self) -> int:
        """Tokens it samples in all."""
        return sum([tokens for _, _, tokens in self.turns])

    @property
    def context(self) -> int:
        """Tokens of its longest context, with what it sampled."""
        first = self.scaffold + self.prompt
        if not self.starts:
            return first + sum([seen + sampled for _, seen, sampled in self.turns])
        end = longest = first
        for start, (_, seen, sampled) in zip(self.starts, self.turns, strict=True):
            end = (end if start is None else start.kept) + seen + sampled
            longest = max(longest, end)
        return longest


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
