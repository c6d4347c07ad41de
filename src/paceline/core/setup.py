"""What the core needs to know of a run: the config, reduced to facts it decides by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from paceline.config import EnvSection, EvalSection, RunConfig
from paceline.core.curriculum import Source
from paceline.domain.ids import EnvName

OnStale = Literal["drop", "train", "mask_tokens"]


class TrainSpec(msgspec.Struct, frozen=True):
    """One training environment."""

    source: Source
    group_size: int
    max_attempts: int
    tasks_per_minute: float | None
    on_stale: OnStale

    @property
    def name(self) -> EnvName:
        return self.source.env


class CoreSetup(msgspec.Struct, frozen=True):
    """All of it."""

    seed: int
    max_steps: int
    train: tuple[TrainSpec, ...]
    evals: tuple[EvalSection, ...]
    examples: dict[EnvName, int]
    """Tasks of each eval: no more than there are."""
    lag: int
    max_staleness: int
    eval_share: float
    target_rollouts: int | None
    target_tokens: int | None
    seq_len: int
    short_last: bool
    dead_group_limit: int
    checkpoint_every: int
    engine_wait_s: float = 0.0
    """Seconds without any engine before the run ends; they may come back meanwhile."""
    park: bool = True
    """Park the youngest rollouts under overload; else they are cancelled."""
    segment_tokens: int | None = None
    """Tokens that one engine request may sample; None sets no limit."""


def train_spec(section: EnvSection, size: int | None, fingerprint: str) -> TrainSpec:
    """`size`: tasks of an epoch, None for an endless source."""
    source = Source(section.label, size, section.weight, section.sampler, section.epochs, fingerprint)
    return TrainSpec(
        source, section.group_size, section.max_attempts, section.tasks_per_minute, section.on_stale
    )


def core_setup(
    config: RunConfig, sizes: Mapping[tuple[str, EnvName], int | None], fingerprints: Mapping[EnvName, str]
) -> CoreSetup:
    """Reduce a config. `sizes` by (split, name): tasks of an epoch, None for endless."""
    return CoreSetup(
        seed=config.run.seed,
        max_steps=config.run.max_steps,
        train=tuple(
            train_spec(e, sizes["train", e.label], fingerprints.get(e.label, "")) for e in config.env
        ),
        evals=config.eval,
        examples={e.label: min(e.examples, sizes["eval", e.label] or e.examples) for e in config.eval},
        lag=config.scheduling.lag,
        max_staleness=config.scheduling.staleness_bound,
        eval_share=config.admission.eval_share,
        target_rollouts=config.batch.target_rollouts,
        target_tokens=config.batch.tokens,
        seq_len=config.batch.seq_len,
        short_last=config.batch.short_last == "ship",
        dead_group_limit=config.batch.dead_group_limit,
        checkpoint_every=config.checkpoint.every,
        engine_wait_s=config.engine.lost_s,
        park=config.admission.park,
        segment_tokens=config.scheduling.segment_tokens,
    )
