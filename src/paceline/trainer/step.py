"""One optimizer step on one global batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.errors import TrainerError
from paceline.trainer.batch import Block, MicroBatch, blocks, check
from paceline.trainer.loss import Diagnostics, LossSettings, policy_loss


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    lr: float = 1e-5
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero to `lr`."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    loss: LossSettings = field(default_factory=LossSettings)


class Trainer:
    """A causal language model from a Hugging Face directory and its AdamW state. Weights and state are float32.

    `version` counts optimizer steps: 0 is the model as loaded, and `step` makes the next.
    """

    def __init__(self, model_dir: Path | str, settings: OptimizerSettings) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        # Dropout would make the trainer disagree with the sampler about the very tokens it sampled.
        self.model.train(False)
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.version = 0
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Train on one global batch, make the next version, and return the step's metrics.

        TrainerError, and an unchanged model, if the batch or the gradient is not usable.
        """
        trainable_tokens = check(micro_batches)
        learning_rate = self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        diagnostics = Diagnostics()
        for micro_batch in micro_batches:
            for block in blocks(micro_batch):
                loss, of_block = policy_loss(self.logits(block), block.tokens, self.settings.loss)
                (loss / trainable_tokens).backward()  # type: ignore[no-untyped-call]
                diagnostics.add(of_block)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
        if not torch.isfinite(torch.tensor(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"the gradient of step {self.version + 1} is {norm}, over {trainable_tokens} tokens "
                f"with ratios up to {diagnostics.ratio_max:g}: lower lr, or look at the advantages"
            )
        self.optimizer.step()
        self.version += 1
        return {**diagnostics.means(), "grad_norm": norm, "lr": learning_rate}

    def logits(self, block: Block) -> torch.Tensor:
        """The predictions of the block's trainable tokens, [T, vocabulary], row by row."""
        if not self._keeps_logits:
            whole: torch.Tensor = self.model(input_ids=block.token_ids, use_cache=False).logits
            return whole[block.predicts]
        # Logits are most of the memory where the vocabulary is large, and most columns are prompt.
        columns = torch.nonzero(block.predicts.any(dim=0)).squeeze(1)
        kept: torch.Tensor = self.model(
            input_ids=block.token_ids, use_cache=False, logits_to_keep=columns
        ).logits
        return kept[block.predicts[:, columns]]

    def _set_learning_rate(self) -> float:
        learning_rate = self.settings.lr * min(1.0, (self.version + 1) / max(self.settings.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate
