"""What is in no log: advantages token by token, and a stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core.advantages import Advantages, Algorithm, GroupView


class PerToken(Algorithm):
    """An advantage of its own for every token, and a stream: neither is in the log."""

    def advantages(self, view: GroupView, replies: Any) -> Advantages:
        values = tuple(
            tuple(np.where(s.trainable, np.arange(s.tokens) + 0.25, 0.0).astype(np.float32) for s in each)
            for each in view.samples
        )
        weights = tuple(tuple(np.full(s.tokens, 0.5, np.float32) for s in each) for each in view.samples)
        return Advantages(values, {"loss_weights": weights})
