"""Cores, made again as a run made them: from its config and what its environments said of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from paceline.domain.ids import EnvName
from paceline.domain.task import Split
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import EnvSection, EvalSection, RunConfig
    from paceline.core.scheduler import Core


class EnvFacts(msgspec.Struct, frozen=True):
    """What the core decides by of an environment and one of its splits, and only the environment knows."""

    split: Split
    name: EnvName
    tasks: int | None
    """None: endless."""
    fingerprint: str = ""
    """Of the tasks."""
    whole_group: bool = False
    """Whether its groups run in one call."""
    all_or_nothing: bool = False
    """Whether it scores them whole."""


def config_at(path: Path) -> RunConfig:
    """A config that the run directory keeps. ConfigError when it is gone."""
    from paceline.config import RunConfig
    from paceline.config.load import load

    if not path.is_file():
        raise ConfigError(f"{path} is not there: replay builds the core from it")
    look_where_the_command_is_given()
    return load(RunConfig, [path], []).value


def look_where_the_command_is_given() -> None:
    """`module:Class` in a config means a module that lies there."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


async def facts_of(config: RunConfig) -> tuple[EnvFacts, ...]:
    """Make the environments once, and ask them. ConfigError for one that cannot be had."""
    from paceline.cli.environments import environment_of
    from paceline.envs.registry import tasks_of

    sections: list[tuple[Split, EnvSection | EvalSection]] = [("train", s) for s in config.env]
    sections += [("eval", s) for s in config.eval]
    found = []
    with TemporaryDirectory() as logs:
        for split, section in sections:
            environment = await environment_of(section, split, logs=Path(logs))
            try:
                source = tasks_of(environment, split, section.label)
                found.append(
                    EnvFacts(
                        split,
                        section.label,
                        source.size,
                        source.fingerprint,
                        environment.whole_group,
                        environment.all_or_nothing,
                    )
                )
            finally:
                await environment.close()
    return tuple(found)


def core_maker(config: RunConfig, facts: Sequence[EnvFacts]) -> Callable[[], Core]:
    """Makes cores as the run made them. ConfigError for a sampler or gate of the user's own that cannot be had."""
    from paceline.cli.environments import own_gates, own_samplers
    from paceline.core.admission.choice import admission_of
    from paceline.core.scheduler import Core
    from paceline.core.scheduling import scheduling_of
    from paceline.core.setup import core_setup

    sizes: dict[tuple[str, EnvName], int | None] = {(f.split, f.name): f.tasks for f in facts}
    whole: list[tuple[str, EnvName]] = [(f.split, f.name) for f in facts if f.whole_group]
    train = [f for f in facts if f.split == "train"]
    fingerprints = {f.name: f.fingerprint for f in train}
    scores_groups = {f.name: f.all_or_nothing for f in train}
    samplers, gates = own_samplers(config), own_gates(config)

    def make() -> Core:
        setup = core_setup(config, sizes, fingerprints, whole_groups=whole, samplers=samplers, gates=gates)
        return Core(setup, admission_of(config, scores_groups), scheduling_of(config))

    return make
