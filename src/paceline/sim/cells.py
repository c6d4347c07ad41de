"""One cell of a study: one policy, one workload, one seed, and the numbers that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from time import process_time

import msgspec
import numpy as np

from paceline.core.admission import Admission
from paceline.core.admission.choice import admission_of
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.scheduling import scheduling_of
from paceline.core.setup import core_setup
from paceline.domain.commands import StartRollout
from paceline.domain.ids import EngineId, EnvName
from paceline.errors import ConfigError
from paceline.sim.bound import lower_bound
from paceline.sim.calibrate import RecordedEngines, recorded_engines
from paceline.sim.engine import Endpoint, EngineModel, RankedEngine, SplitEngine
from paceline.sim.measure import Measure
from paceline.sim.metrics import (
    LengthBias,
    confidence,
    counted_steps,
    engine_use,
    gaps,
    length_biases,
    ramp_s,
    summarize,
    unvisited_share,
)
from paceline.sim.plan import RolloutPlan, Workload
from paceline.sim.requests import Record
from paceline.sim.scoring import Scored
from paceline.sim.simulation import Fold, Simulation
from paceline.sim.study import PolicySection, SimEnv, StudyConfig, WorkloadSection
from paceline.sim.workloads import Recorded, workload_of

Journals = Callable[[str], Iterable[Record]]
"""Reads the journal of a recorded run; the simulator itself opens no file."""


class Point(msgspec.Struct, frozen=True):
    """The world at one moment."""

    at: float
    in_flight: int
    kv_usage: float
    """Mean over the engines, of blocks that running requests hold."""
    waiting: int
    """Requests in the engines' lines."""
    sampled: int
    """Tokens so far."""


class Cell(msgspec.Struct, frozen=True):
    """What one run came to."""

    policy: str
    workload: str
    seed: int
    numbers: dict[str, float]
    points: tuple[Point, ...] = ()
    step_s: tuple[float, ...] = ()
    """Seconds of each step that counts, from the end of the one before."""


class Timeline:
    """Points at even intervals."""

    def __init__(self, simulation: Simulation, every_s: float) -> None:
        self.points: list[Point] = []
        self._simulation = simulation
        self._every_s = every_s
        self._look()

    def _look(self) -> None:
        simulation = self._simulation
        loads = [engine.load(simulation.now) for engine in simulation.engines.values()]
        self.points.append(
            Point(
                at=simulation.now,
                in_flight=len(simulation.running),
                kv_usage=sum(load.kv_usage for load in loads) / len(loads),
                waiting=sum(load.waiting for load in loads),
                sampled=sum(load.generated_tokens for load in loads),
            )
        )
        simulation.at(simulation.now + self._every_s, self._look)


def build(
    study: StudyConfig,
    policy: PolicySection,
    workload: WorkloadSection,
    seed: int,
    *,
    journals: Journals | None = None,
    folds: Sequence[Fold] = (),
    admission: Admission | None = None,
    recorded: RecordedEngines | None = None,
) -> Simulation:
    """The simulation of one cell, ready to run. `recorded`: `engines.recorded`, where these are fitted already. ConfigError when it
    cannot work."""
    made = workloads_of(workload, seed, journals)
    workload = _with_recorded_groups(workload, made)
    scoring = {env.label: env.scoring for env in workload.env if env.scoring is not None}
    made |= {env: Scored(made[env], of, seed) for env, of in scoring.items()}
    workloads = {env: Drawn(each) for env, each in made.items()}
    config = study.run_config(workload, policy, seed)
    sizes = {("train", env.label): env.tasks for env in workload.env}
    setup = core_setup(config, sizes, {})
    chosen = admission or admission_of(config, {})
    if study.engines.recorded and recorded is None:
        recorded = fitted_engines(study, journals)
    return Simulation(
        Core(setup, chosen, scheduling_of(config)),
        engines_of(study, policy, longest_context(workloads), recorded),
        workloads,
        algorithm=builtin(config.algorithm.name, config.algorithm.args),
        rules={env.label: GroupRules.of(env, config.batch, config.filters) for env in config.env},
        trainer=policy.trainer or study.trainer,
        weights=policy.weights or study.weights,
        faults=study.faults,
        poll_s=study.study.poll_s if chosen.learns else None,
        shared_kv_s=study.shared_kv_s,
        scored_at_once={env: of.at_once for env, of in scoring.items() if of.at_once is not None},
        folds=folds,
    )


def fitted_engines(study: StudyConfig, journals: Journals | None) -> RecordedEngines:
    """The engines of `engines.recorded`. ConfigError when these runs do not tell what they cost."""
    section = study.engines
    every = chain.from_iterable(_records(name, journals) for name in section.recorded)
    return recorded_engines(every, section.max_batched_tokens)


def _with_recorded_groups(workload: WorkloadSection, made: Mapping[EnvName, Workload]) -> WorkloadSection:
    """Groups of recorded runs as large as they were. ConfigError where the study says something else."""
    envs: list[SimEnv] = []
    for env in workload.env:
        recorded = made[env.label]
        if isinstance(recorded, Recorded) and env.group_size != (size := recorded.sizes[env.label]):
            if "group_size" in env.model_fields_set:
                raise ConfigError(
                    f"workload {workload.name!r}: env {env.label!r} has group_size {env.group_size}, and the recorded run has "
                    f"groups of {size}: leave group_size out"
                )
            env = env.model_copy(update={"group_size": size})
        envs.append(env)
    return workload.model_copy(update={"env": tuple(envs)})


def engines_of(
    study: StudyConfig, policy: PolicySection, longest: int, recorded: RecordedEngines | None = None
) -> dict[EngineId, Endpoint]:
    """What the core takes for engines, for contexts of up to `longest` tokens. ConfigError when one does not fit."""
    speed = study.speed(longest, recorded, policy.speculation)
    names = [f"e{number}" for number in range(policy.engines or study.engines.count)]
    prefill = policy.prefill or study.engines.prefill
    if prefill is None and study.engines.expert_parallel:
        return {name: RankedEngine(speed, study.engines.gpus) for name in names}
    if prefill is None:
        return {name: EngineModel(speed) for name in names}
    helpers, link = [study.prefill_speed(longest, prefill)] * prefill.count, study.link(prefill)
    return {name: SplitEngine(speed, helpers, link, recompute=prefill.recompute) for name in names}


def check_engines(study: StudyConfig) -> None:
    """ConfigError when what is drawn does not fit the engines of a policy, so that it is no cell that finds it hours later. What
    recorded runs hold is known when they are read."""
    if study.engines.recorded:
        return
    for workload in study.workload:
        if any(env.journal is not None for env in workload.env):
            continue
        longest = longest_context(workloads_of(workload, study.study.first_seed))
        for policy in study.policy:
            try:
                engines_of(study, policy, longest)
            except ConfigError as error:
                raise ConfigError(
                    f"policy {policy.name!r} with workload {workload.name!r}: {error}"
                ) from error


def run_cell(
    study: StudyConfig,
    policy: PolicySection,
    workload: WorkloadSection,
    seed: int,
    journals: Journals | None = None,
    folds: Sequence[Fold] = (),
    admission: Admission | None = None,
    recorded: RecordedEngines | None = None,
) -> Cell:
    """Run one cell and measure it; `admission` instead of what the policy names, `recorded` as for `build`."""
    measure = Measure()
    simulation = build(
        study,
        policy,
        workload,
        seed,
        journals=journals,
        folds=(measure, *folds),
        admission=admission,
        recorded=recorded,
    )
    section = study.study
    timeline = Timeline(simulation, section.sample_s) if section.sample_s else None
    counted = section.most_steps
    steps = None if counted is None else section.skip_steps + counted
    began = process_time()
    until = inf if section.seconds is None else section.seconds
    before = _Before()
    if section.skip_seconds and counted is None:
        simulation.run(until=section.skip_seconds)
        before = _Before.of(simulation, measure)
    simulation.run(until=until, steps=steps)
    cpu_s = process_time() - began
    simulation.core.account.check()
    numbers = _numbers(study, simulation, measure, before)
    numbers["cpu_s"] = cpu_s
    points = tuple(timeline.points) if timeline else ()
    if points:
        numbers["ramp_s"] = ramp_s([p.at for p in points], [p.sampled for p in points], section.skip_seconds)
    ends = [seen.trained for seen in measure.steps if seen.trained is not None]
    step_s = [b - a for a, b in zip([0.0, *ends], ends, strict=False)][section.skip_steps :]
    return Cell(policy.name, workload.name, seed, numbers, points, tuple(step_s))


class _Before(msgspec.Struct, frozen=True):
    """Sums at the moment from which a run counts that is measured by time."""

    at: float = 0.0
    sampled: int = 0

    @classmethod
    def of(cls, simulation: Simulation, measure: Measure) -> _Before:
        return cls(simulation.now, sum(measure.drawn_lengths))


def _numbers(
    study: StudyConfig,
    simulation: Simulation,
    measure: Measure,
    before: _Before,
) -> dict[str, float]:
    now, engines = simulation.now, list(simulation.engines.values())
    use = engine_use(engines, now)
    numbers: dict[str, float] = {
        "seconds": now,
        "rollouts": float(sum(measure.ended.values())),
        "sampled_per_s": use.generated / max(1e-9, now),
        "ended_per_s": (sum(measure.drawn_lengths) - before.sampled) / max(1e-9, now - before.at),
        "idle": use.idle,
        "kv_use": use.kv_use,
        "preemptions": float(use.preemptions),
        "recomputed_share": use.recomputed / max(1, use.generated),
        "prefix_hits": use.prefix_hits,
        "lost_share": sum(measure.lost_tokens.values()) / max(1, measure.sampled),
        "stale_share": measure.lost_tokens.get("stale", 0) / max(1, measure.sampled),
    }
    if use.tokens_per_pass is not None:
        numbers["tokens_per_pass"] = use.tokens_per_pass
    setup = simulation.core.setup
    summary = summarize(measure, study.study.skip_steps, overlapped=setup.lag > 0)
    if summary is None:
        return numbers
    numbers |= {name: float(value) for name, value in msgspec.structs.asdict(summary).items()}
    counted = counted_steps(measure, study.study.skip_steps)
    trained = sum(len(seen.lengths) for seen in counted)
    numbers["s_per_1024"] = summary.seconds / max(1, trained) * 1024
    numbers["rollout_s_per_1024"] = summary.rollout_s * summary.steps / max(1, trained) * 1024
    numbers["recomputed_by_trained"] = use.recomputed / max(1, measure.trained_tokens)
    numbers["unvisited_share"] = unvisited_share(measure, counted)
    drawn = {
        env: each.between(counted[0].began, counted[-1].settled_until)
        for env, each in simulation.workloads.items()
        if isinstance(each, Drawn)
    }
    biases = length_biases(counted, {env: [plan.sampled for plan in plans] for env, plans in drawn.items()})
    if len(drawn) > 1:
        numbers |= {f"length_mean/{env}": bias.mean for env, (_, bias) in biases.items()}
    if biases:
        weights = [count for count, _ in biases.values()]
        for name in LengthBias.__struct_fields__:
            values = [getattr(bias, name) for _, bias in biases.values()]
            numbers[f"length_{name}"] = float(np.average(values, weights=weights))
    plans = [plan for each in drawn.values() for plan in each]
    if plans and len(setup.train) == 1 and all(len(plan.turns) == 1 for plan in plans) and _is_plain(engines):
        bound = lower_bound(
            [plan.prompt for plan in plans],
            [plan.sampled for plan in plans],
            engines[0].speed,
            len(engines),
            group_size=setup.train[0].group_size,
        )
        found = gaps(summary, bound, share=trained / summary.steps / len(plans), overlapped=setup.lag > 0)
        numbers |= {"bound_s": found.bound_s, "step_gap": found.step}
        numbers |= {
            name: gap for name, gap in (("gap", found.rollout), ("even_gap", found.even)) if gap is not None
        }
    return numbers


def _is_plain(engines: Sequence[Endpoint]) -> bool:
    """Whether they are such as the bound knows: they do their own prefill, and sample a token a sequence and step."""
    return all(isinstance(engine, EngineModel) and engine.speed.speculation is None for engine in engines)


class Drawn:
    """A workload that keeps what it draws: the rollouts that the policy makes when nothing is cut short, races or comes
    again. What is trained is compared with them, rollout by rollout the same ones, so that chance plays little part."""

    def __init__(self, workload: Workload) -> None:
        self._drawn: list[tuple[float, RolloutPlan]] = []
        self._workload = workload

    @property
    def longest(self) -> int:
        return self._workload.longest

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        plan = self._workload.plan(command, now)
        if not command.put_off and not command.rollout.attempt and command.task.split == "train":
            self._drawn.append((now, plan))
        return plan

    def between(self, since: float, until: float) -> list[RolloutPlan]:
        """What was drawn from `since` and before `until`."""
        return [plan for at, plan in self._drawn if since <= at < until]


def workloads_of(
    workload: WorkloadSection, seed: int, journals: Journals | None = None
) -> dict[EnvName, Workload]:
    """The workload of each environment."""
    made: dict[EnvName, Workload] = {}
    recorded: dict[str, Recorded] = {}
    for env in workload.env:
        shape = env.shape
        if shape is not None:
            made[env.label] = workload_of(shape, seed)
        elif env.journal is not None:
            if env.journal not in recorded:
                recorded[env.journal] = Recorded.of(_records(env.journal, journals))
            made[env.label] = recorded[env.journal].named(env.label)
    return made


def _records(name: str, journals: Journals | None) -> Iterable[Record]:
    if journals is None:
        raise ConfigError(f"{name!r} is a recorded run, and nobody says how to read one")
    return journals(name)


def longest_context(workloads: Mapping[EnvName, Workload]) -> int:
    """Tokens of the longest context that any rollout may come to."""
    return max(workload.longest for workload in workloads.values())


class Spread(msgspec.Struct, frozen=True):
    """One number over the seeds: its mean, and half the width of its 95% interval."""

    mean: float
    half: float


def spread(cells: Iterable[Cell], name: str) -> Spread | None:
    """None where no cell has it."""
    values = [cell.numbers[name] for cell in cells if name in cell.numbers]
    return Spread(*confidence(values)) if values else None


def paired(cells: Sequence[Cell], better: str, base: str, name: str, workload: str) -> Spread | None:
    """`base` by `better` in `name`, seed by seed: how many times as long the base takes, or as much it makes."""

    def of(policy: str) -> dict[int, float]:
        return {
            c.seed: c.numbers[name]
            for c in cells
            if (c.policy, c.workload) == (policy, workload) and name in c.numbers
        }

    ours, theirs = of(better), of(base)
    ratios = [theirs[seed] / ours[seed] for seed in ours if seed in theirs and ours[seed]]
    return Spread(*confidence(ratios)) if ratios else None
