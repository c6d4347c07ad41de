"""Whether what a config names can be imported: packages, environments, algorithms, services."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.checks.model import has_tool_support, model_here
from paceline.config import (
    EmbeddedEngine,
    EnvSection,
    EvalSection,
    ProcessWorkers,
    RayWorkers,
    ReferenceTrainer,
    RunConfig,
)
from paceline.domain.task import Split
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.doctor import Finding

if TYPE_CHECKING:
    from paceline.envs.workers.wire import Opened

_ONE_IMPORTS = threading.Lock()
"""Held while a user's modules are imported: two that need each other, imported by two threads at once, wait for each other until
Python gives one of them up."""


def packages(config: RunConfig) -> list[Finding]:
    needs: list[tuple[str, str, tuple[str, ...]]] = []
    train = [
        *(["engine.type = 'embedded'"] if isinstance(config.engine, EmbeddedEngine) else []),
        *(["trainer.type = 'reference'"] if isinstance(config.trainer, ReferenceTrainer) else []),
    ]
    if train:
        needs.append((" and ".join(train), "train", ("torch", "transformers", "safetensors")))
    if config.metrics.prometheus is not None:
        needs.append(("metrics.prometheus", "prometheus", ("prometheus_client",)))
    if config.metrics.wandb is not None:
        needs.append(("metrics.wandb", "wandb", ("wandb",)))
    if config.metrics.tensorboard is not None:
        needs.append(("metrics.tensorboard", "tensorboard", ("tensorboardX",)))
    found = []
    for what, extra, packages in needs:
        missing = [name for name in packages if not _is_installed(name)]
        if missing:
            found.append(
                Finding(
                    "error",
                    f"{what} {'need' if ' and ' in what else 'needs'} packages that are not installed",
                    f"missing: {', '.join(missing)}",
                    f"pip install 'paceline[{extra}]'",
                )
            )
    return found or [Finding("ok", "packages", "all that the config uses are installed")]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a finder that refuses it; a half-imported module
        return False


def env_check(config: RunConfig, section: EnvSection | EvalSection) -> Callable[[], list[Finding]]:
    def check() -> list[Finding]:
        from paceline.cli.environments import check_group
        from paceline.cli.prompts import prompt_findings
        from paceline.envs.registry import environment_class, make_environment, tasks_of
        from paceline.envs.tool_env import declares_tools as declares_tools_of

        split: Split = "train" if isinstance(section, EnvSection) else "eval"
        table = "env" if split == "train" else "eval"
        found: list[Finding] = []
        if isinstance(section.workers, RayWorkers):
            return [_ray_check(section.label)]
        if isinstance(section.workers, ProcessWorkers):
            opened = asyncio.run(_try_worker(section, split))
            size, declares_tools, name = opened.size, opened.has_tools, section.id
            ranks_members = opened.whole_group and not opened.roles
        else:
            with _ONE_IMPORTS:
                environment_class(section.id)
            environment = make_environment(section.id, section.args)
            try:
                check_group(section, environment)
                source = tasks_of(environment, split, section.label)
                size = source.size
                found += prompt_findings(config, section, environment, source, model_here(config))
                declares_tools = declares_tools_of(environment)
                name = type(environment).__name__
                ranks_members = environment.whole_group and not getattr(environment, "roles", ())
            finally:
                asyncio.run(environment.close())  # the run makes its own
        if isinstance(section, EvalSection) and size is not None and section.examples > size:
            found.append(
                Finding(
                    "warning",
                    f"eval {section.label!r} asks for more examples than there are",
                    f"examples {section.examples} > {size} eval tasks",
                    f"set examples to {size}",
                )
            )
        if isinstance(section, EvalSection) and ranks_members:
            found += _other_groups(config, section)
        if declares_tools and has_tool_support(config) is False:
            found.append(
                Finding(
                    "error",
                    f"{table} {section.label!r} uses tools, and the chat template does not know them",
                    f"{name}.tools is set; the template of {config.model.name} renders the "
                    "same text with a tool list as without",
                    "set model.chat_template to a template that renders `tools`",
                )
            )
        told = "endless" if size is None else str(size)
        return found or [Finding("ok", f"{table} {section.label!r}", f"{told} {split} tasks")]

    return check


def _other_groups(config: RunConfig, section: EvalSection) -> list[Finding]:
    """What is wrong with an eval whose rewards come of whole groups, if they are not as large as those that train."""
    sizes = {env.group_size for env in config.env if env.id == section.id}
    if not sizes or section.k in sizes:
        return []
    trained = " or ".join(map(str, sorted(sizes)))
    return [
        Finding(
            "warning",
            f"eval {section.label!r} scores groups of another size than training",
            f"k = {section.k}; group_size = {trained}, and {section.id} is handed whole groups",
            f"set k to {trained}, unless its rewards do not compare members",
        )
    ]


async def _try_worker(section: EnvSection | EvalSection, split: Split) -> Opened:
    """What one worker of the environment says of it. ConfigError when it does not come up."""
    from paceline.cli.environments import check_group, environment_of

    alone = section.model_copy(update={"workers": section.workers.model_copy(update={"count": 1})})
    with tempfile.TemporaryDirectory() as logs:
        environment = await environment_of(alone, split, logs=Path(logs))
        try:
            check_group(section, environment)
            opened: Opened = environment.pool.opened  # type: ignore[attr-defined]
        finally:
            await environment.close()
    return opened


def _ray_check(label: str) -> Finding:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"env {label!r} runs on Ray, which is not installed: pip install 'paceline[ray]'")
    return Finding("ok", f"env {label!r}", "runs on Ray; its tasks are counted when the run starts")


def algorithms(config: RunConfig) -> list[Finding]:
    from paceline.cli.assemble import algorithm_of

    sections = {id(s): s for s in (config.algorithm, *(env.algorithm for env in config.env)) if s is not None}
    found = []
    for section in sections.values():
        try:
            with _ONE_IMPORTS:
                algorithm_of(section.name, section.args)
        except PacelineError as error:
            found.append(Finding("error", f"algorithm {section.name!r}", str(error)))
        else:
            found.append(Finding("ok", f"algorithm {section.name!r}"))
    return found


def services(config: RunConfig) -> list[Finding]:
    from paceline.cli.services import chat_of, imported

    tries: list[tuple[str, str, Callable[[], Any]]] = [
        (name, path, partial(imported, path, f"service {name!r}")) for name, path in config.services.items()
    ]
    tries += [(name, section.url, partial(chat_of, name, section)) for name, section in config.chat.items()]
    found = []
    for name, where, attempt in tries:
        try:
            with _ONE_IMPORTS:
                attempt()
        except PacelineError as error:
            found.append(Finding("error", f"service {name!r}", str(error)))
        else:
            found.append(Finding("ok", f"service {name!r}", where))
    return found
