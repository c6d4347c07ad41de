"""How batches are cut and packed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section


class BatchSection(Section):
    """One optimizer step's worth of training data."""

    rollouts: int | None = Field(default=None, ge=1)
    """Rollouts of a batch. Give this or `tokens`; 128 when neither is given."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens of a batch, counting every token of every sample that ships."""
    seq_len: int = Field(default=2048, ge=2)
    """Longest sample the trainer takes, in tokens."""
    overlong: Literal["cut", "drop"] = "cut"
    """A longer sample is cut to `seq_len` (its status becomes truncated) or its rollout is dropped; counted."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens of one packed micro-batch; none takes `seq_len`."""
    data_parallel: int = Field(default=1, ge=1)
    """Trainer ranks a batch is cut for."""
    pad_to_multiple_of: int = Field(default=1, ge=1)
    """Micro-batches are padded to a multiple of this many tokens."""
    short_last: Literal["ship", "leave"] = "ship"
    """When every source is exhausted, what is left is shipped as a short batch, or reported as left over."""
    dead_group_limit: int = Field(default=512, ge=1)
    """Groups in a row that may bring nothing to train before the run ends with the counts."""

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if self.rollouts is not None and self.tokens is not None:
            raise ValueError(
                f"rollouts {self.rollouts} and tokens {self.tokens} are both given: a batch is cut by one of them"
            )
        if (self.micro_batch_tokens or self.seq_len) < self.seq_len:
            raise ValueError(
                f"micro_batch_tokens {self.micro_batch_tokens} < seq_len {self.seq_len}: a sample that long "
                "would not fit; raise micro_batch_tokens or lower seq_len"
            )
        return self

    @property
    def target_rollouts(self) -> int | None:
        """Rollouts of a batch; None when batches are cut by tokens."""
        return self.rollouts or (None if self.tokens else 128)
