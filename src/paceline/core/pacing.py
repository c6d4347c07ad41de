"""How many rollouts may exist: the bounded lag.

`docs/architecture.md` ("Staleness and pacing") says why places are counted the way they are.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.core.staleness import lead
from paceline.domain.ids import Version


class Pacing:
    """Counts the places of rollouts that have not been cut into a batch yet."""

    __slots__ = ("_lag", "_per_batch", "_seen_rollouts", "_seen_tokens", "_target_tokens", "taken")

    def __init__(
        self, lag: int, target_rollouts: int | None, target_tokens: int | None, tokens_guess: int
    ) -> None:
        """`tokens_guess`: tokens of a shipped rollout, until the first batch has told."""
        self._lag = lag
        self._target_tokens = target_tokens
        self._per_batch = target_rollouts or max(1, -(-(target_tokens or 1) // tokens_guess))
        self._seen_rollouts = 0.0
        self._seen_tokens = 0.0
        self.taken = 0
        """Rollouts that hold a place: promised by an open group, in flight, being processed, or listed."""

    @property
    def per_batch(self) -> int:
        """Rollouts of one batch; an estimate when batches are cut by tokens."""
        return self._per_batch

    @property
    def most(self) -> int:
        """Rollouts that can hold a place when the engines hold what was trained last."""
        return (self._lag + 1) * self._per_batch

    def free(self, cut: int, held: Version) -> int:
        """Places left, with `cut` batches cut so far and all engines holding at least `held`; may be negative."""
        # Batches that may still be filled: the one being collected leads `held` by lead(cut + 1, held).
        batches = self._lag + 1 - lead(cut + 1, held)
        return batches * self._per_batch - self.taken

    def may_cut(self, step: int, held: Version) -> bool:
        """Whether batch `step` may be cut: the engines must be at most `lag` steps behind what it trains."""
        return lead(step, held) <= self._lag

    def snapshot(self) -> dict[str, Any]:
        """What was learnt of the size of a rollout; places are counted anew."""
        return {"rollouts": self._seen_rollouts, "tokens": self._seen_tokens}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot. Without, a resumed run would begin with the guess again, and so with places for
        several times too many or too few."""
        self._seen_rollouts, self._seen_tokens = state.get("rollouts", 0.0), state.get("tokens", 0.0)
        self._learn()

    def shipped(self, rollouts: int, tokens: int) -> None:
        """A batch was cut: learn how many rollouts make one, for when batches are cut by tokens."""
        self.taken -= rollouts
        # Half-life of one batch, so that a drift in length is followed.
        self._seen_rollouts = self._seen_rollouts / 2 + rollouts
        self._seen_tokens = self._seen_tokens / 2 + tokens
        self._learn()

    def _learn(self) -> None:
        if self._target_tokens is not None and self._seen_tokens:
            rollouts = self._target_tokens * self._seen_rollouts / self._seen_tokens
            self._per_batch = max(1, math.ceil(rollouts - 1e-9))
