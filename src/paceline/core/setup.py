"""What the core needs to know of a run: the config, reduced to facts it decides by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import inf
from typing import Final, Literal

import msgspec

from paceline.config import EnvSection, EvalSection, RunConfig
from paceline.core.curriculum import Source
from paceline.core.gates import GATES, Gate, Gates, build_gate
from paceline.core.mix import Mix, MixBy, MixTarget
from paceline.core.quarantine import Patience
from paceline.core.samplers import LEARNING, TaskSampler, build_sampler
from paceline.core.streams import key
from paceline.domain.ids import EnvName
from paceline.errors import ConfigError

OnStale = Literal["drop", "train", "mask_tokens"]

_KEEP_GROUPS_WHOLE: Final = ("overlap", "synchronous")
"""Scheduling policies under which a group's members start together and are never put off one by one."""


class TrainSpec(msgspec.Struct, frozen=True):
    """One training environment."""

    source: Source
    group_size: int
    max_attempts: int
    tasks_per_minute: float | None
    on_stale: OnStale
    max_concurrent: int | None = None
    floor: float | None = None
    ceiling: float | None = None
    sampler: Callable[[], TaskSampler] | None = None
    """Makes the sampler of its tasks, where that learns how they go."""
    gates: Callable[[], Gates] | None = None
    """Makes the gates of its groups, where it has any."""
    patience: Patience | None = None
    """With tasks that fail; None draws each as often as the source says."""

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
    checkpoint_every_s: float = inf
    """Seconds after which a checkpoint is due with the next batch, however few steps it has been."""
    outage_s: float = 3600.0
    """Seconds that all training environments may be out before the run ends."""
    engine_wait_s: float = 0.0
    """Seconds without any engine before the run ends; they may come back meanwhile."""
    park: bool = True
    """Park the youngest rollouts under overload; else they are cancelled."""
    segment_tokens: int | None = None
    """Tokens that one engine request may sample; None sets no limit."""
    mix_by: MixBy = "draws"
    """What the environments' weights are shares of."""
    whole_groups: frozenset[tuple[str, EnvName]] = frozenset()
    """Environments, with their split, whose groups run in one call."""

    def mix(self) -> Mix:
        """A new mix. ConfigError for floors and ceilings that cannot be."""
        batch = self.target_tokens if self.mix_by == "tokens" else self.target_rollouts
        size = max(spec.group_size for spec in self.train)
        targets = [
            MixTarget(spec.name, spec.source.weight, spec.group_size, spec.floor, spec.ceiling)
            for spec in self.train
        ]
        # Where batches are counted otherwise than the mix: some groups, and half a sequence a rollout.
        guess = 8 * size * (self.seq_len // 2 if self.mix_by == "tokens" else 1)
        return Mix(targets, self.mix_by, float(batch or guess))


def train_spec(
    section: EnvSection,
    size: int | None,
    fingerprint: str,
    seed: int = 0,
    samplers: Mapping[EnvName, type[TaskSampler]] = {},
    gates: Mapping[str, type[Gate]] = {},
) -> TrainSpec:
    """`size`: tasks of an epoch, None for an endless source. `samplers`: the users' own, by environment; `gates`: the
    same, by import path."""
    sampler: Callable[[], TaskSampler] | None = None
    if (factory := samplers.get(section.label) or LEARNING.get(section.sampler)) is not None:
        mine = key(seed, "sampler", section.label)
        sampler = partial(build_sampler, section.sampler, factory, size, mine, section.sampler_args)
        sampler()  # what does not fit is said now
    makes_gates: Callable[[], Gates] | None = None
    if section.gates:
        makes_gates = partial(_gates, section, size, key(seed, "gates", section.label), {**GATES, **gates})
        makes_gates()
    source = Source(section.label, size, section.weight, section.sampler, section.epochs, fingerprint)
    patience = None
    if size is not None and section.epochs is None and section.quarantine_after is not None:
        patience = Patience(section.quarantine_after, size)
    return TrainSpec(
        source,
        section.group_size,
        section.max_attempts,
        section.tasks_per_minute,
        section.on_stale,
        section.max_concurrent,
        section.draw_floor,
        section.draw_ceiling,
        sampler,
        makes_gates,
        patience,
    )


def _gates(section: EnvSection, size: int | None, seed: int, known: Mapping[str, type[Gate]]) -> Gates:
    return Gates(
        {gate.label: build_gate(gate.label, known[gate.id], size, seed, gate.args) for gate in section.gates}
    )


def core_setup(
    config: RunConfig,
    sizes: Mapping[tuple[str, EnvName], int | None],
    fingerprints: Mapping[EnvName, str],
    *,
    whole_groups: Collection[tuple[str, EnvName]] = (),
    samplers: Mapping[EnvName, type[TaskSampler]] = {},
    gates: Mapping[str, type[Gate]] = {},
) -> CoreSetup:
    """Reduce a config. `sizes` by (split, name): tasks of an epoch, None for endless. `whole_groups`: environments
    whose groups run in one call. `samplers`, `gates`: the users' own. ConfigError for what does not fit together."""
    if whole_groups and config.scheduling.type not in _KEEP_GROUPS_WHOLE:
        _, name = next(iter(whole_groups))
        raise ConfigError(
            f"env {name!r} runs its groups in one call, and scheduling.type {config.scheduling.type!r} starts and "
            f"stops rollouts one by one: use {' or '.join(map(repr, _KEEP_GROUPS_WHOLE))}"
        )
    return CoreSetup(
        seed=config.run.seed,
        max_steps=config.run.max_steps,
        train=tuple(
            train_spec(
                e, sizes["train", e.label], fingerprints.get(e.label, ""), config.run.seed, samplers, gates
            )
            for e in config.env
        ),
        evals=config.eval,
        examples={e.label: min(e.examples, sizes["eval", e.label] or e.examples) for e in config.eval},
        lag=config.scheduling.lag,
        max_staleness=config.staleness_bound,
        eval_share=config.admission.eval_share,
        target_rollouts=config.batch.target_rollouts,
        target_tokens=config.batch.tokens,
        seq_len=config.batch.seq_len,
        short_last=config.batch.short_last == "ship",
        dead_group_limit=config.batch.dead_group_limit,
        outage_s=config.run.outage_s,
        checkpoint_every=config.checkpoint.every,
        checkpoint_every_s=config.checkpoint.every_s,
        engine_wait_s=config.engine.lost_s,
        park=config.admission.park,
        segment_tokens=config.scheduling.segment_tokens,
        mix_by=config.mix.by if len(config.env) > 1 else "draws",
        whole_groups=frozenset(whole_groups),
    )
