"""Everything a run needs before it starts, as independent checks, each naming both sides of what does not fit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cli.checks import imports, machine, model, servers
from paceline.config import RunConfig, SglangEngine, VllmEngine
from paceline.runtime.doctor import Check, Finding, examine

if TYPE_CHECKING:
    from paceline.config.load import Loaded


async def diagnose(loaded: Loaded[RunConfig], *, limit_s: float = 4.5) -> list[Finding]:
    """All findings about a config, errors first, in at most about `limit_s` seconds."""
    _import_our_own()
    # A server is given most of the time: its first request after a start takes seconds on a busy machine.
    checks = checks_of(loaded, probe_s=max(servers.PROBE_S, limit_s - 1.5))
    findings = one_cause_once(await examine(checks, limit_s=limit_s))
    rank = {"error": 0, "warning": 1, "ok": 2}
    return sorted(findings, key=lambda finding: rank[finding.level])


def one_cause_once(findings: list[Finding]) -> list[Finding]:
    """Several checks meet what is wrong with one thing (the model, the module of two environments): it is told once,
    by the first of them, with the names of the others."""
    told: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        # What a check has no words of its own for is named after it; else `what` is part of the cause.
        cause = finding.facts if finding.level == "error" and not finding.remedy else ""
        key = (finding.level, cause, "" if cause else f"{finding.what}: {finding.facts}")
        if key not in told:
            told[key] = finding
        elif cause and finding.what != told[key].what:
            told[key] = msgspec.structs.replace(told[key], what=f"{told[key].what}, {finding.what}")
    return list(told.values())


def _import_our_own() -> None:
    """All that the checks import of ours, before they run in threads: modules that need each other, imported by two
    threads at once, wait for each other until Python gives one of them up."""
    for name in (
        "cli.assemble",
        "cli.prompts",
        "cli.services",
        "cli.trainer",
        "engines.http",
        "engines.sglang",
        "envs",
        "observe.sinks",
    ):
        importlib.import_module(f"paceline.{name}")


def checks_of(loaded: Loaded[RunConfig], *, probe_s: float = servers.PROBE_S) -> dict[str, Check]:
    """The checks of a config by name. `probe_s`: seconds a server may take to be up, and for each answer."""
    config = loaded.value
    checks: dict[str, Check] = {
        "model": lambda: model.model(config),
        "chat template": lambda: model.template(config),
        "lengths": lambda: model.lengths(loaded),
        "packages": lambda: imports.packages(config),
        "algorithm": lambda: imports.algorithms(config),
        "services": lambda: imports.services(config),
        "run directory": lambda: machine.run_dir(config),
        "memory": lambda: machine.memory(config),
        "open files": lambda: machine.open_files(config),
        "ports": lambda: machine.ports(config),
    }
    for number, env in enumerate(config.env):
        checks[f"env[{number}] {env.label!r}"] = imports.env_check(config, env)
    for number, held_out in enumerate(config.eval):
        checks[f"eval[{number}] {held_out.label!r}"] = imports.env_check(config, held_out)
    if isinstance(config.engine, VllmEngine | SglangEngine):
        for url in config.engine.urls:
            checks[f"engine {url}"] = servers.server_check(loaded, config.engine, url, probe_s)
    return checks


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For scripts."""
    return [{name: getattr(finding, name) for name in finding.__struct_fields__} for finding in findings]
