"""Group-relative advantages: reward minus the group's mean, over its spread if asked for.

GRPO is from DeepSeekMath (arXiv:2402.03300, eq. 3), which also divides by the group's standard deviation
(`grpo_std` here) and averages over each response before it averages over responses (`per_response`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.advantages.base import Advantages, Algorithm, GroupView, centred, spread
from paceline.domain.sample import Stream
from paceline.errors import ConfigError


class Grpo(Algorithm):
    """A = r - mean(r).

    The trainer takes one mean over all trainable tokens of a batch, so every token weighs the same. With
    `per_response`, a `loss_weights` stream makes every rollout of a group weigh the same instead, as published:
    a token of rollout i weighs (mean tokens of the group) / (tokens of i), which leaves the group's total as it is.
    """

    name = "grpo"
    divides = False

    def __init__(self, per_response: bool = False) -> None:
        if not isinstance(per_response, bool):
            raise ConfigError(
                f"algorithm {self.name!r}: per_response must be true or false, not {per_response!r}"
            )
        self.per_response = per_response

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        values = centred(view)
        if self.divides and (deviation := spread(view)) > 0:
            values /= deviation
        return Advantages(values, {"loss_weights": per_response_weights(view)} if self.per_response else {})


class GrpoStd(Grpo):
    """A = (r - mean(r)) / std(r), with the population's standard deviation: |A| <= sqrt(n - 1).

    Exactly 0 when no reward differs. Where only a member that does not vote differs, there is no spread to divide
    by, and its difference stays as it is.
    """

    name = "grpo_std"
    divides = True


def per_response_weights(view: GroupView) -> tuple[tuple[Stream, ...], ...]:
    """Weights that make every member's trainable tokens sum to the same; 1 on average over the group's tokens."""
    trainable = [sum(sample.trainable_tokens for sample in samples) for samples in view.samples]
    training = [tokens for tokens in trainable if tokens]
    mean = sum(training) / len(training) if training else 0.0
    return tuple(
        tuple(np.full(sample.tokens, mean / tokens, np.float32) for sample in samples)
        for samples, tokens in zip(view.samples, trainable, strict=True)
    )
