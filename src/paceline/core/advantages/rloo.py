"""RLOO: the baseline of a rollout is the mean of the others.

REINFORCE leave-one-out (Kool, van Hoof and Welling, 2019; for language models arXiv:2402.14740). Unbiased, since a
rollout's own reward is not in its baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.advantages.base import Advantages, Algorithm, GroupView, centred


class Rloo(Algorithm):
    """A = r - mean of the other members' rewards, which is n / (n - 1) times (r - mean(r)).

    A member without others gets 0. One that does not vote is compared with all that do. Where
    there are references, they are the others, and no member of the view is.
    """

    name = "rloo"

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        values = centred(view)
        voters = int(np.count_nonzero(view.votes))
        if voters > 1 and not len(view.references):
            values[view.votes] *= voters / (voters - 1)
        return Advantages(values)
