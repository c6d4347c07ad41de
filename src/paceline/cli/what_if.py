"""A study of a recorded run: itself again on modelled engines, and under other caps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.rundir import config_file
from paceline.cli.studies import records_of
from paceline.config import EmbeddedEngine, FixedAdmission, RunConfig, UnbiasedTailScheduling
from paceline.config.load import load
from paceline.domain import events as on
from paceline.errors import ConfigError
from paceline.sim.calibrate import RecordedEngines, recorded_engines
from paceline.sim.recorded_world import recorded_world
from paceline.sim.study import SimEnv, StudyConfig, WorkloadSection
from paceline.sim.workloads import Recorded

AS_RECORDED = "as recorded"
"""Name of the policy that the run had."""
_MOST_STEPS = 20


def workload_of_run(run: Path, recorded: Recorded, config: RunConfig | None = None) -> WorkloadSection:
    """Its rollouts, each environment by itself, with groups as large as they were; `config` says how they are mixed."""
    sections = {env.label: env for env in config.env} if config is not None else {}
    path = str(run.resolve())
    envs: list[SimEnv] = []
    for env, size in recorded.sizes.items():
        said = sections.get(env)
        more: dict[str, Any] = {}
        if said is not None:
            more = said.model_dump(include={"weight", "tasks_per_minute", "max_attempts"})
        envs.append(SimEnv(name=env, journal=path, group_size=size, **more))
    return WorkloadSection(name=run.resolve().name, env=tuple(envs))


def study_of_run(run: Path, engines_from: Sequence[Path] = ()) -> tuple[StudyConfig, RecordedEngines]:
    """Rollouts, trainer and weights as its journal tells, and engines as those of `engines_from` do (none: its own), under the
    policy of its config; where its cap is fixed, also with half and twice that. As many steps as it trained, up to 20. With the engines,
    fitted. ConfigError when it does not tell enough."""
    config = _config_of(run)
    records = list(records_of(run))
    recorded = Recorded.of(records)
    section = config.engine
    limits: dict[str, int] = {}
    if isinstance(section, EmbeddedEngine):
        limits = section.model_dump(include={"max_num_seqs", "max_batched_tokens"})
    fitted = engines_from or [run]
    told = records_of(*engines_from) if engines_from else records
    engines = recorded_engines(told, limits.get("max_batched_tokens", 8192))
    if engines.kv_tokens is None:
        raise ConfigError(
            f"the engines of {', '.join(map(str, fitted))} did not tell how many tokens they hold: give a study that says so "
            f"(engines.kv_tokens), with --from {run} --engines-from {fitted[0]}"
        )
    world = recorded_world(records)
    trained = max(event.step for _, event, _ in records if isinstance(event, on.StepTrained))
    name = re.sub(r"[^\w.-]", "-", run.resolve().name).lstrip(".-") or "run"
    study = StudyConfig.model_validate(
        {
            "study": {
                "name": f"{name}-what-if",
                "seeds": 1,
                "steps": min(trained, _MOST_STEPS),
                "poll_s": config.metrics.load_interval_s,
                "zero_signal": config.filters.zero_advantage,
            },
            "engines": {
                "recorded": [str(each.resolve()) for each in fitted],
                "count": engines.count,
                **limits,
            },
            "batch": config.batch.model_dump(),
            "trainer": world.trainer.model_dump(),
            "weights": world.weights.model_dump(),
            "workload": [workload_of_run(run, recorded, config)],
            "policy": _policies(config),
        }
    )
    return study, engines


def _config_of(run: Path) -> RunConfig:
    path = config_file(run, 0)
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there, which says what the policy was: give a study, paceline simulate STUDY.toml --from {run}"
        )
    return load(RunConfig, [path]).value


def _policies(config: RunConfig) -> list[dict[str, Any]]:
    scheduling, admission, algorithm = config.scheduling, config.admission, config.algorithm
    own: dict[str, Any] = {"scheduling": scheduling.model_dump(), "algorithm": algorithm.model_dump()}
    if isinstance(scheduling, UnbiasedTailScheduling):
        own["scheduling"]["late"] = config.late  # by engines, which a study does not name
    if ":" in algorithm.name:
        # What is trained does not go by it, but for groups without a signal.
        own["algorithm"] = {"name": "rloo" if isinstance(scheduling, UnbiasedTailScheduling) else "grpo"}
    told = admission.model_dump()
    policies = [{"name": AS_RECORDED, "admission": told, **own}]
    if isinstance(admission, FixedAdmission):
        caps = [cap for cap in (admission.cap // 2, 2 * admission.cap) if cap]
        policies += [{"name": f"cap {cap}", "admission": told | {"cap": cap}, **own} for cap in caps]
    return policies
