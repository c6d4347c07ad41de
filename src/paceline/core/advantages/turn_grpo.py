"""Advantages turn by turn, for environments that say what each turn earned (`Result.turn_rewards`).

What a turn is worth is what was earned from it on: G_t = r_t + discount * G_(t+1), as in REINFORCE (Williams, 1992).
Its baseline is the mean of G_t over the members of the group that have a turn t, so a token is credited for what came
after it and compared with what others made of the same point. Multi-turn GRPO with turn-level credit is in
arXiv:2505.11821; this is its reward-to-go form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.advantages.base import Advantages, Algorithm, GroupView, centred
from paceline.core.samples import turns_of_tokens
from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError


class TurnGrpo(Algorithm):
    """A_t = G_t - mean(G_t). A rollout without turn rewards earned its reward with its last turn."""

    name = "turn_grpo"

    def __init__(self, discount: float = 1.0) -> None:
        if not isinstance(discount, int | float) or not 0 <= discount <= 1:
            raise ConfigError(f"algorithm {self.name!r}: discount must be from 0 to 1, not {discount!r}")
        self.discount = float(discount)

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        if all(rollout.turn_rewards is None for rollout in view.rollouts):
            return Advantages(centred(view))
        returns = [self._returns(rollout) for rollout in view.rollouts]
        voting = [each for each, votes in zip(returns, view.votes.tolist(), strict=True) if votes]
        longest = max((len(each) for each in returns), default=0)
        baseline = np.zeros(longest)
        for turn in range(longest):
            there = [float(each[turn]) for each in voting if len(each) > turn]
            baseline[turn] = sum(there) / len(there) if there else 0.0
        values = []
        for rollout, samples, worth in zip(view.rollouts, view.samples, returns, strict=True):
            better = (worth - baseline[: len(worth)]).astype(np.float32)
            values.append(
                tuple(
                    [
                        np.where(turns >= 0, better[turns], np.float32(0.0))
                        for turns in turns_of_tokens(rollout, samples)
                    ]
                )
            )
        return Advantages(tuple(values))

    def _returns(self, rollout: Rollout) -> NDArray[np.float64]:
        """What was earned from each turn on."""
        count = len(rollout.turns)
        earned = rollout.turn_rewards
        if earned is None:
            earned = (*[0.0] * (count - 1), 0.0 if rollout.reward is None else rollout.reward)
        worth = np.zeros(count)
        after = 0.0
        for turn in range(count - 1, -1, -1):
            worth[turn] = after = earned[turn] + self.discount * after
        return worth
