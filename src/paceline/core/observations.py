"""What an environment said after an answer, as tokens to learn to predict.

A policy that models its environment's answers (the output of a tool, the next move of an opponent) may be trained on
their likelihood beside the policy gradient on its own tokens. Whose words a token is comes with the turn
(`Turn.roles`); only what a later turn added counts, so neither the task itself nor a history that was rendered anew is
learnt by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from paceline.core.samples import chains_of
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample

STREAM: Final = "likelihood_weights"
"""float32[T]: weight of each token's log-likelihood in the loss; 0 where the token is none of these."""

_ROLES: Final = ("tool", "user")


def observed(rollout: Rollout, samples: Sequence[Sample], weight: float) -> tuple[Sample, ...]:
    """The samples with a stream of weights, where there is anything to weigh. `samples` are all that train of it."""
    if not weight:
        return tuple(samples)
    done: list[Sample] = []
    for sample, (chain, context) in zip(samples, chains_of(rollout, samples), strict=True):
        weights = np.zeros(sample.tokens, np.float32)
        at = 0
        for place, number in enumerate(chain):
            turn = rollout.turns[number]
            start = at
            if place >= context and turn.extends and number:
                for role, count in turn.roles:
                    if role in _ROLES:
                        weights[start : start + count] = weight
                    start += count
            at += len(turn.prompt_ids) + len(turn.sampled_ids)
        if weights.any():
            weights.setflags(write=False)
            sample = msgspec.structs.replace(sample, streams={**sample.streams, STREAM: weights})
        done.append(sample)
    return tuple(done)
