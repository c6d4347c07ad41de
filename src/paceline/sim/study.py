"""A study: policies x workloads x seeds, as a TOML file describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import Field, ValidationError, field_validator, model_validator

from paceline.config import (
    AdmissionSection,
    AlgorithmSection,
    FixedAdmission,
    OverlapScheduling,
    RunConfig,
    SchedulingSection,
)
from paceline.config.base import FILE_NAME, Section
from paceline.config.batch import BatchSection
from paceline.config.load import load
from paceline.core.advantages import builtin
from paceline.errors import ConfigError
from paceline.sim.calibrate import RecordedEngines
from paceline.sim.engine import (
    GPUS,
    MODELS,
    Efficiency,
    GpuSpec,
    Link,
    ModelSpec,
    PrefillEngines,
    Speculation,
    Speed,
    speed_of,
)
from paceline.sim.scoring import ScoringModel
from paceline.sim.workloads import PRESETS, AgentTurns, ReasoningLengths
from paceline.sim.world import FaultModel, TrainerModel, WeightsModel

DEAD_GROUPS: Final = 1000
"""Groups in a row that bring nothing to train before a cell ends with the error of a run. A simulation has no hours to wait for
better ones, and goes on where all but one group in a hundred die; where none can train it would go on for ever. A study may allow
more of them (`batch.dead_group_limit`)."""

_LEAST_S: Final = 1e-3
"""Between two looks at the engines: less would be lost in the virtual time of a long run, which then would not go on."""
_SHARES: Final = ("weights", "kv", "kv_mha", "compute", "attention")
_LEAST_SHARE: Final = 0.001
"""Of the efficiencies in `_SHARES`: kernels that waste more are a mistake in the study."""


class EnginesSection(Section):
    """The engines."""

    model: str = "qwen3-8b"
    """A model that Paceline knows (`paceline simulate --list`), or one of `[models.NAME]`."""
    gpu: str = "H100"
    """A GPU that Paceline knows, or one of `[gpus.NAME]`."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of one engine, which share one copy of the weights."""
    expert_parallel: bool = False
    """Whether they share the experts alone, and each has the other weights and sequences of its own: data parallel attention,
    expert parallel layers."""
    recorded: tuple[str, ...] = ()
    """Directory of a run whose engines are taken instead of a model on a GPU: what their steps cost as `paceline calibrate`
    fits it, and the capacity that they told. Directories of several, with the same engines under other loads, tell more."""
    count: int = Field(default=1, ge=1)
    """Engines."""
    slow: float = Field(default=1.0, gt=0)
    """Every step takes this many times what the model says: fitted to one measured time of the system at hand."""
    utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the memory that the engine may take."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests that run together."""
    max_batched_tokens: int = Field(default=8192, ge=16)
    """Tokens of one step."""
    enters_by_chunk: bool = False
    """Whether a request enters when the blocks of its first chunk are free, as in vLLM before March 2026, rather than those of
    its whole context; it is preempted again when the rest find none."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context; none: whatever the workload needs."""
    kv_tokens: int | None = Field(default=None, ge=64)
    """Capacity of the KV cache in tokens; none: what the memory leaves."""
    shared_kv_gb_s: float | None = Field(default=None, gt=0)
    """Engines share a pool of KV, and bring it at this many gigabytes a second, so that a rollout may go on elsewhere
    without a prefill; none: each has its own."""
    prefill: PrefillEngines | None = None
    """Engines that prefill for each of these, which then only decode; none: each does both."""
    speculation: Speculation | None = None
    """How they speculate; none: they do not."""

    @field_validator("recorded", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class SimEnv(Section):
    """One environment of a workload."""

    name: str | None = None
    """Name in metrics; the preset's, or the kind's, when left out. Of a recorded run with several environments: which."""
    preset: str | None = None
    """A workload by name: `paceline simulate --list`."""
    reasoning: ReasoningLengths | None = None
    """Single answers, instead of a preset."""
    agents: AgentTurns | None = None
    """Agents, instead of a preset."""
    journal: str | None = None
    """The rollouts of this recorded run, instead of a preset: its directory."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task; of a recorded run, as many as it had."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the other environments'."""
    tasks: int | None = Field(default=None, ge=1)
    """Tasks of an epoch; none: every group is a new task."""
    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Most rollouts started a minute."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts at one member."""
    scoring: ScoringModel | None = None
    """How its rollouts are scored; none: as the preset or the recorded run has it, all at once."""

    @model_validator(mode="after")
    def _one_kind(self) -> SimEnv:
        given = [k for k in ("preset", "reasoning", "agents", "journal") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of preset, reasoning, agents and journal, not {given or 'none'}"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"no preset {self.preset!r}; there are {', '.join(PRESETS)}")
        return self

    @property
    def label(self) -> str:
        """The name it goes by."""
        kind = "reasoning" if self.reasoning else "agents" if self.agents else "recorded"
        return self.name or self.preset or kind

    @property
    def shape(self) -> ReasoningLengths | AgentTurns | None:
        """What is drawn; None for a recorded run."""
        return PRESETS[self.preset] if self.preset is not None else self.reasoning or self.agents


class WorkloadSection(Section):
    """What is rolled out."""

    name: str
    """Name in the results."""
    env: tuple[SimEnv, ...] = Field(min_length=1)
    """Its environments, mixed by `weight`."""
    rollouts: int | None = Field(default=None, ge=1)
    """Rollouts of a batch; none: as `[batch]` says."""


class PolicySection(Section):
    """How it is scheduled."""

    name: str
    """Name in the results."""
    scheduling: SchedulingSection = OverlapScheduling()
    """As `[scheduling]` of a run."""
    admission: AdmissionSection = FixedAdmission(cap=1024)
    """As `[admission]` of a run."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """As `[algorithm]` of a run."""
    engines: int | None = Field(default=None, ge=1)
    """Engines, where it differs from `[engines]`: overlapping schemes share the GPUs with the trainer."""
    prefill: PrefillEngines | None = None
    """Where it differs from `[engines.prefill]`."""
    speculation: Speculation | None = None
    """Where it differs from `[engines.speculation]`."""
    weights: WeightsModel | None = None
    """Where it differs from `[weights]`."""
    trainer: TrainerModel | None = None
    """Where it differs from `[trainer]`."""


class StudySection(Section):
    """The study itself."""

    name: str = Field(default="study", max_length=60, pattern=FILE_NAME)
    """Name of the files that are written: at most 60 letters, digits, `_`, `-` and `.`."""
    seeds: int = Field(default=5, ge=1)
    """Seeds; all policies meet the same tasks under one."""
    first_seed: int = Field(default=1, ge=0)
    """The first of them."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of a run that count; none: until `seconds`, or 5 where these are not given either."""
    skip_steps: int = Field(default=0, ge=0)
    """Steps before them that do not."""
    seconds: float | None = Field(default=None, gt=0)
    """Virtual seconds after which a run stops at the latest; none: when its steps are taken."""
    skip_seconds: float = Field(default=0.0, ge=0)
    """Seconds that do not count, where a run is measured by time."""
    poll_s: float = Field(default=5.0, ge=_LEAST_S)
    """Seconds between readings of the engines' metrics, for admission that looks at them."""
    sample_s: float | None = Field(default=None, ge=_LEAST_S)
    """Seconds between points of the plots over time; none takes none."""
    zero_signal: bool = False
    """Whether groups whose members have equal rewards are kept out of batches, as in a run; papers count them."""

    @model_validator(mode="after")
    def _something_counts(self) -> StudySection:
        if self.seconds is not None and self.skip_seconds >= self.seconds:
            raise ValueError(
                f"skip_seconds {self.skip_seconds:g} leave nothing to count of seconds {self.seconds:g}: lower them"
            )
        return self

    @property
    def most_steps(self) -> int | None:
        """Steps after which a run ends; None: it ends by its seconds."""
        return 5 if self.steps is None and self.seconds is None else self.steps


class StudyConfig(Section):
    """Policies x workloads x seeds."""

    study: StudySection = StudySection()
    """The study itself."""
    engines: EnginesSection = EnginesSection()
    """The engines."""
    efficiency: dict[str, float] = {}
    """Constants of the engine model that differ from the fitted ones, by name."""
    gpus: dict[str, GpuSpec] = {}
    """GPUs of your own."""
    models: dict[str, ModelSpec] = {}
    """Models of your own."""
    batch: BatchSection = BatchSection(rollouts=128, seq_len=1 << 20)
    """As `[batch]` of a run."""
    trainer: TrainerModel = TrainerModel()
    """The trainer."""
    weights: WeightsModel = WeightsModel()
    """How engines take new weights."""
    faults: FaultModel = FaultModel()
    """What goes wrong."""
    workload: tuple[WorkloadSection, ...] = Field(min_length=1)
    """Workloads; each is run with each policy."""
    policy: tuple[PolicySection, ...] = Field(default=(PolicySection(name="overlap"),), min_length=1)
    """Policies."""

    @model_validator(mode="after")
    def _names(self) -> StudyConfig:
        for kind, names in (
            ("workload", [w.name for w in self.workload]),
            ("policy", [p.name for p in self.policy]),
        ):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two sections of {kind} are called {twice[0]!r}: rename one")
        for what, name, known in (
            ("model", self.engines.model, {**MODELS, **self.models}),
            ("gpu", self.engines.gpu, {**GPUS, **self.gpus}),
        ):
            if name not in known:
                raise ValueError(
                    f"engines.{what} {name!r} is not known; there are {', '.join(sorted(known))}"
                )
        for policy in self.policy:
            self._engines_agree(policy)
        return self

    @model_validator(mode="after")
    def _engines_as_recorded(self) -> StudyConfig:
        section, fields = self.engines, EnginesSection.model_fields
        given = [
            key
            for key in ("slow", "expert_parallel", "shared_kv_gb_s")
            if getattr(section, key) != fields[key].default
        ]
        if section.recorded and given:
            raise ValueError(
                "engines.recorded takes engines as a run had them, and what changes a model of them would be ignored: leave "
                f"{', '.join(given)} out of [engines]"
            )
        return self

    @model_validator(mode="after")
    def _efficiency_can_be(self) -> StudyConfig:
        known_names = [n for n in Efficiency.__struct_fields__ if n != "all_reduce_s"]
        if unknown := sorted(set(self.efficiency) - set(known_names)):
            raise ValueError(f"efficiency has no {unknown[0]!r}; there are {', '.join(known_names)}")
        for name, value in self.efficiency.items():
            if name in _SHARES and not _LEAST_SHARE <= value <= 1:
                raise ValueError(
                    f"efficiency.{name} is {value:g}, and is a share of what the data sheet says: from {_LEAST_SHARE} to 1"
                )
            if value < 0 or (value == 0 and name == "network_gb_s"):
                raise ValueError(
                    f"efficiency.{name} is {value:g}: it takes {'more than 0' if value == 0 else '0 or more'}"
                )
        return self

    def _engines_agree(self, policy: PolicySection) -> None:
        section, where = self.engines, f"policy {policy.name!r}"
        prefill, speculation = policy.prefill or section.prefill, policy.speculation or section.speculation
        if prefill is not None and section.shared_kv_gb_s is not None:
            raise ValueError(
                f"{where}: engines.shared_kv_gb_s brings KV from a pool, and prefill from prefill engines: leave one out"
            )
        for what, given in (("prefill", prefill), ("speculation", speculation)):
            if given is not None and section.recorded:
                raise ValueError(
                    f"{where}: {what} needs to know the model and its GPUs, and engines.recorded tells only what steps of "
                    "whole engines cost: leave one out"
                )
        lost, engines = len(self.faults.engine_lost_at_s), policy.engines or section.count
        if lost > engines:
            raise ValueError(
                f"{where}: faults.engine_lost_at_s has {lost} times, and engines.count or the policy gives {engines}: give at "
                "most one for each engine, or take more engines"
            )
        known = {**GPUS, **self.gpus}
        if prefill is not None and prefill.gpu is not None and prefill.gpu not in known:
            raise ValueError(
                f"{where}: prefill.gpu {prefill.gpu!r} is not known; there are {', '.join(sorted(known))}"
            )

    def speed(
        self, longest: int, recorded: RecordedEngines | None = None, speculation: Speculation | None = None
    ) -> Speed:
        """Of one engine, for contexts of up to `longest` tokens; `recorded` are the engines of `engines.recorded`,
        `speculation` is instead of `engines.speculation`. ConfigError when one does not fit."""
        speed = self._modelled(longest) if recorded is None else self._recorded(longest, recorded)
        return self._limited(speed, longest, "an engine", speculation=speculation or self.engines.speculation)

    def prefill_speed(self, longest: int, prefill: PrefillEngines) -> Speed:
        """Of one prefill engine. ConfigError when a context does not fit it."""
        return self._limited(self._modelled(longest, prefill), longest, "a prefill engine")

    def link(self, prefill: PrefillEngines) -> Link:
        """What moving KV into a decode engine takes."""
        return Link(self._model.kv_bytes_per_token / (prefill.link_gb_s * 1e9), prefill.link_s)

    def _limited(
        self, speed: Speed, longest: int, what: str, speculation: Speculation | None = None
    ) -> Speed:
        section = self.engines
        if longest > speed.kv_tokens:
            raise ConfigError(
                f"a context of {longest} tokens does not fit {what} of {speed.kv_tokens}: take more GPUs an engine, "
                "or a shorter cap"
            )
        if longest > speed.max_model_len:
            raise ConfigError(
                f"a context may come to {longest} tokens, and {what} takes {speed.max_model_len}: raise "
                "engines.max_model_len, or take a shorter cap"
            )
        return msgspec.structs.replace(
            speed,
            max_num_seqs=section.max_num_seqs,
            max_batched_tokens=section.max_batched_tokens,
            enters_by_chunk=section.enters_by_chunk,
            speculation=speculation,
        )

    def _recorded(self, longest: int, recorded: RecordedEngines) -> Speed:
        section = self.engines
        kv_tokens = section.kv_tokens or recorded.kv_tokens
        if kv_tokens is None:
            raise ConfigError(
                f"the engines of {', '.join(section.recorded)} did not tell how many tokens they hold: set engines.kv_tokens"
            )
        longest = section.max_model_len or recorded.max_model_len or longest
        return recorded.calibration.speed(kv_tokens=kv_tokens, max_model_len=longest)

    def _modelled(self, longest: int, prefill: PrefillEngines | None = None) -> Speed:
        section = self.engines
        gpu, gpus, kv_tokens = section.gpu, section.gpus, section.kv_tokens
        if prefill is not None and (prefill.gpu or prefill.gpus):
            gpu, gpus, kv_tokens = prefill.gpu or gpu, prefill.gpus or gpus, None
        return speed_of(
            self._model,
            {**GPUS, **self.gpus}[gpu],
            gpus=gpus,
            expert_parallel=section.expert_parallel,
            slow=section.slow,
            efficiency=Efficiency(**self.efficiency),  # type: ignore[arg-type]
            utilization=section.utilization,
            max_model_len=section.max_model_len or longest,
            kv_tokens=kv_tokens,
        )

    @property
    def _model(self) -> ModelSpec:
        return {**MODELS, **self.models}[self.engines.model]

    @property
    def shared_kv_s(self) -> float | None:
        """Seconds to bring one token's KV from the pool; None without one."""
        rate = self.engines.shared_kv_gb_s
        if rate is None:
            return None
        return self._model.kv_bytes_per_token / (rate * 1e9)

    def run_config(self, workload: WorkloadSection, policy: PolicySection, seed: int) -> RunConfig:
        """The config of the run that one cell simulates: what the production code decides by. ConfigError when it refuses it."""
        try:
            return self._run_config(workload, policy, seed)
        except ValidationError as error:
            where = _place(policy, workload)
            raise ConfigError("; ".join(f"{where}: {problem}" for problem in problems_of(error))) from error

    def check(self) -> None:
        """ConfigError with all that production code refuses of any policy with any workload, so that it is no cell that
        finds it hours later."""
        places: dict[str, list[str]] = {}
        for workload in self.workload:
            for policy in self.policy:
                for problem in self._refused(workload, policy):
                    places.setdefault(problem, []).append(_place(policy, workload))
        lines = [
            f"{where[0]}{f' (and {len(where) - 1} more)' if where[1:] else ''}: {problem}"
            for problem, where in places.items()
        ]
        if lines:
            told = [f"{len(lines)} things are wrong in the study:", *lines] if lines[1:] else lines
            raise ConfigError("\n  ".join(told))

    def _refused(self, workload: WorkloadSection, policy: PolicySection) -> list[str]:
        problems: list[str] = []
        try:
            self._run_config(workload, policy, self.study.first_seed)
        except ValidationError as error:
            problems += problems_of(error)
        try:
            builtin(policy.algorithm.name, policy.algorithm.args)
        except ConfigError as error:
            problems.append(str(error))
        return problems

    def _run_config(self, workload: WorkloadSection, policy: PolicySection, seed: int) -> RunConfig:
        study = self.study
        batch: dict[str, Any] = self.batch.model_dump()
        if workload.rollouts is not None:
            batch.update(rollouts=workload.rollouts, tokens=None)
        elif batch["rollouts"] is None and batch["tokens"] is None:
            batch["rollouts"] = 128
        return RunConfig.model_validate(
            {
                "run": {"seed": seed, "max_steps": 1 << 30},
                "model": {"name": self.engines.model},
                "sampling": {"max_tokens": 1},
                "env": [_env(env) for env in workload.env],
                "scheduling": policy.scheduling.model_dump(),
                "admission": policy.admission.model_dump(),
                "algorithm": policy.algorithm.model_dump(),
                "batch": batch | {"dead_group_limit": max(DEAD_GROUPS, self.batch.dead_group_limit)},
                "filters": {"zero_advantage": study.zero_signal},
                "checkpoint": {"every": 1 << 30},
                "trainer": {"type": "external"},
            }
        )


def _env(env: SimEnv) -> dict[str, Any]:
    return {
        "id": "simulated",
        "name": env.label,
        "group_size": env.group_size,
        "weight": env.weight,
        "tasks_per_minute": env.tasks_per_minute,
        "max_attempts": env.max_attempts,
        "sampler": "sequential",
    }


def _place(policy: PolicySection, workload: WorkloadSection) -> str:
    return f"policy {policy.name!r} with workload {workload.name!r}"


def problems_of(error: ValidationError) -> list[str]:
    """What is wrong, a line each, with the key where there is one."""
    lines = []
    for found in error.errors(include_url=False, include_input=False):
        said = found["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, found["loc"]))
        lines.append(f"{key}: {said}" if key else said)
    return lines


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """Read a study file. ConfigError names everything that is wrong with it."""
    loaded = load(StudyConfig, [path], overrides)
    study = loaded.value
    for workload in study.workload:
        for env in workload.env:
            if (
                env.journal is not None
                and not (path.parent / env.journal).exists()
                and not Path(env.journal).exists()
            ):
                raise ConfigError(f"workload {workload.name!r}: no run at {env.journal!r}")
    study.check()
    return study
