"""Samples: the flat token sequences a trainer learns from."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import EnvName, RolloutId, Version
from paceline.domain.rollout import Ending, VersionRuns

Stream = NDArray[np.float32] | NDArray[np.int32] | NDArray[np.uint8]


class Sample(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One token sequence. Arrays have length T, are read-only, and never change after they are made."""

    token_ids: NDArray[np.int32]
    trainable: NDArray[np.bool_]
    """False on prompt and tool tokens; the loss skips them."""
    logprobs: NDArray[np.float32]
    """Natural log, of the distribution sampled from; 0.0 where not trainable."""
    versions: VersionRuns
    """Run-length over the trainable tokens only, in order; the counts add up to `trainable.sum()`."""
    rollout: RolloutId
    env: EnvName
    task_index: int
    ending: Ending
    reward: float
    temperature: float
    advantage: float | NDArray[np.float32] = 0.0
    """One number for all trainable tokens, or float32[T]."""
    streams: dict[str, Stream] = {}
    """Optional named per-token arrays [T, ...], such as `loss_weights` or `ref_logprobs`."""
    cut_tokens: int = 0
    """Trainable tokens that were cut off to fit the sequence length."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trainable_tokens(self) -> int:
        versions = self.versions
        return versions[0][1] if len(versions) == 1 else sum([n for _, n in versions])

    @property
    def oldest_version(self) -> Version:
        """Oldest version that sampled any trainable token here."""
        return min(v for v, n in self.versions if n)
