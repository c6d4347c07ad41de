"""The run itself, and the root that holds every section."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.admission import AdmissionSection, FixedAdmission
from paceline.config.algorithm import AlgorithmSection
from paceline.config.base import FILE_NAME, Section
from paceline.config.batch import BatchSection
from paceline.config.engine import ChatSection, EmbeddedEngine, EngineSection
from paceline.config.environment import EnvSection, EvalSection
from paceline.config.filters import FiltersSection
from paceline.config.gateway import GatewaySection
from paceline.config.journal import JournalSection
from paceline.config.metrics import MetricsSection
from paceline.config.mix import MixSection
from paceline.config.model import ModelSection, SamplingSection
from paceline.config.scheduling import (
    OverlapScheduling,
    PartialScheduling,
    SchedulingSection,
    SynchronousScheduling,
    UnbiasedTailScheduling,
)
from paceline.config.trainer import CheckpointSection, ReferenceTrainer, TrainerSection


class RunSection(Section):
    """The run."""

    name: str = Field(default="run", max_length=60, pattern=FILE_NAME)
    """Name of the run; its directory is `dir/name`, with a number behind it when that exists already."""
    dir: str = "runs"
    """Folder that holds run directories."""
    seed: int = Field(default=0, ge=0)
    """Seeds task order, mixing, group states and sampling noise."""
    deterministic: bool = False
    """Whether a run of the same config, on the same machine, makes the same batches bit for bit. Needs the embedded engine and
    `scheduling.type = "synchronous"`, and costs speed: docs/repeating.md."""
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps; the run ends when the last one's weights are in."""
    outage_s: float = Field(default=3600.0, ge=0)
    """Seconds that all training environments may be out (their rollouts fail with the cause `infrastructure`, and now
    and then one is tried) before the run ends."""
    quiet_s: float = Field(default=120.0, gt=0)
    """Seconds without any progress after which the run says what waits longest, and for what."""
    drain_s: float = Field(default=8.0, gt=0)
    """Seconds that everything, the trainer's last checkpoint included, may take to stop after Ctrl-C or SIGTERM; what
    takes longer is abandoned."""


class RunConfig(Section):
    """Everything one run needs."""

    run: RunSection = RunSection()
    """The run."""
    model: ModelSection
    """The policy in training."""
    sampling: SamplingSection = SamplingSection()
    """How tokens are drawn."""
    env: tuple[EnvSection, ...] = Field(min_length=1)
    """Environments trained on, mixed by `weight`."""
    mix: MixSection = MixSection()
    """What the environments' weights are shares of."""
    eval: tuple[EvalSection, ...] = ()
    """Held-out measurements."""
    engine: EngineSection = EmbeddedEngine()
    """Where tokens come from."""
    scheduling: SchedulingSection = OverlapScheduling()
    """What is done about rollouts that do not end together."""
    admission: AdmissionSection = FixedAdmission()
    """How many rollouts may run."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """How rewards become advantages."""
    filters: FiltersSection = FiltersSection()
    """What is kept out of training."""
    batch: BatchSection = BatchSection()
    """How batches are cut and packed."""
    trainer: TrainerSection = ReferenceTrainer()
    """Who trains."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What `--resume` goes on from."""
    journal: JournalSection = JournalSection()
    """What is kept on disk."""
    metrics: MetricsSection = MetricsSection()
    """Where numbers go."""
    gateway: GatewaySection = GatewaySection()
    """Where agent programs reach the policy."""
    services: dict[str, str] = {}
    """I/O that algorithms ask for by name: name = `module:async_callable`."""
    chat: dict[str, ChatSection] = {}
    """Services that are chat endpoints, by name."""

    @model_validator(mode="before")
    @classmethod
    def _engine_returns_ids(cls, given: Any) -> Any:
        engine = given.get("engine") if isinstance(given, dict) else None
        if isinstance(engine, dict) and engine.get("type") == "openai_chat":
            raise ValueError(
                'engine.type = "openai_chat": a chat endpoint returns text, and training needs the ids and logprobs '
                "of what was sampled: use vllm, sglang or embedded, and put chat endpoints under [chat.NAME]"
            )
        return given

    @model_validator(mode="after")
    def _services_are_unique(self) -> Self:
        if twice := sorted(set(self.services) & set(self.chat)):
            raise ValueError(
                f"service {twice[0]!r} is both in [services] and a [chat.{twice[0]}]: rename one"
            )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for kind, names in (("env", [e.label for e in self.env]), ("eval", [e.label for e in self.eval])):
            for name in names:
                if name == "all":
                    raise ValueError(
                        f"{kind} name 'all' is reserved for totals in metrics: choose another name"
                    )
                if names.count(name) > 1:
                    raise ValueError(
                        f"two {kind} sections are both called {name!r}: give one of them a `name`"
                    )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        target = self.batch.target_rollouts
        for env in self.env:
            size = env.group_size
            if target is not None and size > target:
                raise ValueError(
                    f"env {env.label!r} has group_size {size} > batch.rollouts {target}: a group would never fit "
                    "one batch; lower group_size or raise batch.rollouts"
                )
        return self

    @model_validator(mode="after")
    def _every_rank_is_trained(self) -> Self:
        ranks = self.batch.data_parallel
        if ranks > 1 and isinstance(self.trainer, ReferenceTrainer):
            raise ValueError(
                f"batch.data_parallel is {ranks}, but the reference trainer is one rank, and would leave the rest of "
                'each batch untrained: set data_parallel = 1, or trainer.type = "external"'
            )
        return self

    @property
    def late(self) -> Literal["pinned", "resume"]:
        """How `unbiased_tail` has a response back: by its noise, where the engine's goes by (seed, position)."""
        section = self.scheduling
        if isinstance(section, UnbiasedTailScheduling) and section.late != "auto":
            return section.late
        return "pinned" if isinstance(self.engine, EmbeddedEngine) else "resume"

    @property
    def staleness_bound(self) -> int:
        """Most steps between the version a batch trains and the oldest that sampled a rollout in it."""
        if isinstance(self.scheduling, UnbiasedTailScheduling) and self.late == "pinned":
            return 0
        return self.scheduling.staleness_bound

    @model_validator(mode="after")
    def _the_late_have_a_baseline(self) -> Self:
        section = self.scheduling
        if not isinstance(section, UnbiasedTailScheduling):
            return self
        if section.late == "pinned" and not isinstance(self.engine, EmbeddedEngine):
            raise ValueError(
                f'scheduling.late = "pinned" needs noise that depends on (seed, position) alone, and engine '
                f'{self.engine.type!r} does not promise that: use late = "resume" (or "auto")'
            )
        for env in self.env:
            name = (env.algorithm or self.algorithm).name
            if name != "rloo" and ":" not in name:
                raise ValueError(
                    f"env {env.label!r} has algorithm {name!r}, whose baseline contains the rollout itself: with "
                    'scheduling.type = "unbiased_tail" late rollouts would weigh differently; use algorithm.name = "rloo"'
                )
            if env.all_or_nothing:
                raise ValueError(
                    f"env {env.label!r} is all_or_nothing, but unbiased_tail puts rollouts off one by one, so that its "
                    "groups would be incomplete: use another scheduling.type"
                )
        return self

    @model_validator(mode="after")
    def _partial_rollouts_may_grow_as_old_as_they_get(self) -> Self:
        section = self.scheduling
        if not isinstance(section, PartialScheduling) or section.budget_tokens is None:
            return self
        for env in self.env:
            longest = env.limits.max_rollout_tokens or env.sampling.over(self.sampling).max_tokens
            steps = -(-longest // section.budget_tokens) - 1
            if steps > section.max_staleness and env.on_stale == "drop":
                raise ValueError(
                    f"a rollout of env {env.label!r} may sample {longest} tokens, which at scheduling.budget_tokens "
                    f"{section.budget_tokens} takes {steps} further steps, but max_staleness is "
                    f"{section.max_staleness}: the longest would always be dropped; raise max_staleness or "
                    'budget_tokens, or set on_stale = "mask_tokens"'
                )
        return self

    @model_validator(mode="after")
    def _can_be_repeated(self) -> Self:
        if not self.run.deterministic:
            return self
        if not isinstance(self.engine, EmbeddedEngine):
            raise ValueError(
                f"run.deterministic is true, but engine {self.engine.type!r} does not promise the same tokens whoever shares a "
                'step with them, as engine.type = "embedded" does: set it to false; from what was recorded, the batches of any '
                "engine are made again by `paceline replay RUN --batches`"
            )
        if self.engine.dtype != "float32":
            raise ValueError(
                f"run.deterministic is true, but engine.dtype is {self.engine.dtype!r}: the engine keeps the last bits in "
                '"float32" only'
            )
        if not isinstance(self.scheduling, SynchronousScheduling):
            raise ValueError(
                f"run.deterministic is true, but under scheduling.type {self.scheduling.type!r} the clock decides which version "
                'samples a token: set scheduling.type = "synchronous"'
            )
        if not isinstance(self.admission, FixedAdmission) and not self.admission.park:
            raise ValueError(
                "run.deterministic is true, but admission.park is false: under overload the youngest rollouts are cancelled, "
                "whenever that is; set admission.park = true"
            )
        return self

    @model_validator(mode="after")
    def _tokens_fit(self) -> Self:
        for section in self.env:
            sampling = section.sampling.over(self.sampling)
            processed = self.engine.type == "embedded"
            if (sampling.top_p < 1 or sampling.top_k > 0) and not processed:
                raise ValueError(
                    f"env {section.label!r} samples with top_p {sampling.top_p}, top_k {sampling.top_k}, but "
                    f"engine {self.engine.type!r} may return logprobs of the unprocessed distribution: use "
                    "top_p = 1 and top_k = -1 for training rollouts"
                )
            if (sampling.top_p < 1 or sampling.top_k > 0) and self.trainer.type == "reference":
                raise ValueError(
                    f"env {section.label!r} samples with top_p {sampling.top_p}, top_k {sampling.top_k}, and its logprobs are of what "
                    "these leave of the distribution; the reference trainer computes them of all of it, so that no ratio would be "
                    'right: use top_p = 1 and top_k = -1 for training rollouts, or a trainer that cuts off the same (trainer.type = "external")'
                )
            if sampling.max_tokens >= self.batch.seq_len:
                raise ValueError(
                    f"env {section.label!r} may sample {sampling.max_tokens} tokens a turn, but batch.seq_len is "
                    f"{self.batch.seq_len}: every such rollout would be cut; lower sampling.max_tokens or raise seq_len"
                )
        return self
