"""The reference trainer: batches in, an optimizer step, weights out. It knows nothing of the orchestrator.

Needs the `train` extra. `batch` says what a micro-batch is and checks it, `loss` turns logits into a loss and
its diagnostics, `step` runs one optimizer step, `weights` publishes a version, `checkpoint` saves and resumes.
"""

from __future__ import annotations

from paceline.trainer.batch import MicroBatch
from paceline.trainer.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from paceline.trainer.loss import LossSettings
from paceline.trainer.step import OptimizerSettings, Trainer
from paceline.trainer.weights import model_directory, write_model

__all__ = [
    "LossSettings",
    "MicroBatch",
    "OptimizerSettings",
    "Trainer",
    "latest_checkpoint",
    "load_checkpoint",
    "model_directory",
    "save_checkpoint",
    "write_model",
]
