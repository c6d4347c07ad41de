"""Who trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.base import Section


class ReferenceTrainer(Section):
    """Paceline's own trainer (needs the `train` extra), started with the run in a process of its own."""

    type: Literal["reference"] = "reference"
    """Which trainer."""
    loss: Literal["ppo", "dppo"] = "dppo"
    """Policy loss: ratio clipping, or masking by how far the probability moved."""
    lr: float = Field(default=1e-5, gt=0)
    """AdamW learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moments."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio (or, for dppo, how far down the probability) may move."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio (or, for dppo, how far up the probability) may move."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL term: against `ref_logprobs` where the samples carry them, else the sampling policy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the published weights; training itself runs in float32."""
    threads: int = Field(default=1, ge=1)
    """Torch threads."""
    start_s: float = Field(default=300.0, gt=0)
    """Seconds it may take to start."""
    step_s: float = Field(default=3600.0, gt=0)
    """Seconds one optimizer step may take before the run ends with the cause."""


class ExternalTrainer(Section):
    """Your trainer: it reads batches with `paceline.read_batches` and publishes weight directories."""

    type: Literal["external"]
    """Which trainer."""
    step_s: float = Field(default=7200.0, gt=0)
    """Seconds without an acknowledgement, with a batch waiting, before the run ends with the cause."""


TrainerSection = Annotated[ReferenceTrainer | ExternalTrainer, Field(discriminator="type")]


class CheckpointSection(Section):
    """What `--resume` goes on from."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    every_s: float = Field(default=60.0, gt=0)
    """Seconds after which the orchestrator saves its own state with the next batch, however few steps it has been: what a kill
    can lose of what admission, samplers and scheduling have learnt."""
    keep_last: int = Field(default=3, ge=1)
    """Checkpoints kept; of weights and batches, as many versions as going back to the oldest of them takes: `every` times this,
    and those that engines may still load."""
