"""Dr. GRPO: group-relative advantages without the two biases of GRPO.

"Understanding R1-Zero-Like Training" (arXiv:2503.20783, section 3.2) shows that dividing by a response's length
favours long wrong answers, and that dividing by the group's spread favours tasks that are too easy or too hard. It
drops both: A = r - mean(r), and the loss is the plain sum over tokens divided by a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.advantages.base import Advantages, Algorithm, GroupView, centred


class DrGrpo(Algorithm):
    """A = r - mean(r), and every token of a batch weighs the same, whatever its response or group.

    No weights are sent: the trainer's one mean over all trainable tokens of a batch is the published sum up to one
    factor a step, (rollouts x constant length) / (trainable tokens), which no response can influence alone. The
    same numbers as `grpo` without `per_response`; the name is a promise that neither bias can be switched on.
    """

    name = "dr_grpo"

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        return Advantages(centred(view))
