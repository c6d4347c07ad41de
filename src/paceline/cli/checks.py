"""Everything a run needs before it starts, as independent checks, each naming both sides of what does not fit."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.config import (
    EmbeddedEngine,
    EnvSection,
    EvalSection,
    ProcessWorkers,
    RayWorkers,
    ReferenceTrainer,
    RunConfig,
    SglangEngine,
    VllmEngine,
)
from paceline.domain.task import Split
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.doctor import Check, Finding, examine

if TYPE_CHECKING:
    from paceline.config.load import Loaded
    from paceline.engines.http import ServerFacts
    from paceline.envs.workers.wire import Opened

_SMALL_DISK = 512 * 2**20
_PROBE_S = 3.0
_ONE_IMPORTS = threading.Lock()
"""Held while a user's modules are imported, for the same reason as `_import_our_own` has."""
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


async def diagnose(loaded: Loaded[RunConfig], *, limit_s: float = 4.5) -> list[Finding]:
    """All findings about a config, errors first, in at most about `limit_s` seconds."""
    _import_our_own()
    # A server is given most of the time: its first request after a start takes seconds on a busy machine.
    checks = checks_of(loaded, probe_s=max(_PROBE_S, limit_s - 1.5))
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


def checks_of(loaded: Loaded[RunConfig], *, probe_s: float = _PROBE_S) -> dict[str, Check]:
    """The checks of a config by name. `probe_s`: seconds a server may take to be up, and for each answer."""
    config = loaded.value
    checks: dict[str, Check] = {
        "model": lambda: _model(config),
        "chat template": lambda: _template(config),
        "lengths": lambda: _model_lengths(loaded),
        "packages": lambda: _packages(config),
        "algorithm": lambda: _algorithms(config),
        "services": lambda: _services(config),
        "run directory": lambda: _run_dir(config),
        "ports": lambda: _ports(config),
    }
    for number, env in enumerate(config.env):
        checks[f"env[{number}] {env.label!r}"] = _env_check(config, env)
    for number, held_out in enumerate(config.eval):
        checks[f"eval[{number}] {held_out.label!r}"] = _env_check(config, held_out)
    if isinstance(config.engine, VllmEngine | SglangEngine):
        for url in config.engine.urls:
            checks[f"engine {url}"] = _server_check(loaded, config.engine, url, probe_s)
    return checks


# ---- the model and its tokenizer


def local_model_dir(name: str) -> Path | None:
    """The model's directory, if it is here already; None for a hub id that is yet to be fetched."""
    from paceline.tokens import resolve_model_dir

    is_hub_id = not name.startswith(("pkg:", ".", "/", "~")) and name.count("/") == 1
    if not is_hub_id or Path(name).exists():
        return resolve_model_dir(name)
    if importlib.util.find_spec("huggingface_hub") is None:
        return resolve_model_dir(name)  # raises, with what to do
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # whatever it is, it is not here
        return None


def _model_here(config: RunConfig) -> Path | None:
    """The model's directory, for checks that look into it; None where there is nothing to look at. If it is wrong,
    `_model` says so."""
    try:
        directory = local_model_dir(config.model.name)
    except PacelineError:
        return None
    return directory if directory is not None and (directory / "config.json").is_file() else None


def _model(config: RunConfig) -> list[Finding]:
    directory = local_model_dir(config.model.name)
    if directory is None:
        return [
            Finding(
                "warning",
                f"model {config.model.name} is fetched from the hub when the run starts",
                "nothing of it is here yet, so its tokenizer and its lengths were not checked",
                f"fetch it first: hf download {config.model.name}",
            )
        ]
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.name = {config.model.name!r}: {directory} has no config.json")
    weights = list(directory.glob("*.safetensors"))
    if not weights and isinstance(config.engine, EmbeddedEngine):
        raise ConfigError(
            f"{directory} has no *.safetensors: save the model with save_pretrained(safe_serialization=True)"
        )
    size = sum(file.stat().st_size for file in weights)
    named = "" if str(directory) == config.model.name else f" ({config.model.name})"
    return [Finding("ok", "model", f"{directory}{named}, {size / 1e6:.1f} MB of weights")]


def _template(config: RunConfig) -> list[Finding]:
    from paceline.tokens import ChatTokenizer, probe_append_only, user

    directory = _model_here(config)
    if directory is None:
        return []
    tokenizer = ChatTokenizer.load(directory, config.model.chat_template)
    tokenizer.encode(tokenizer.render([user("What is 1 + 1?")]))
    append_only = probe_append_only(tokenizer)
    return [Finding("ok" if append_only.holds else "warning", "chat template", append_only.summary)]


def _has_tool_support(config: RunConfig) -> bool | None:
    """Whether the template renders a tool list; None when there is no template to try."""
    from paceline.tokens import ChatTokenizer, user

    directory = _model_here(config)
    if directory is None:
        return None
    tokenizer = ChatTokenizer.load(directory, config.model.chat_template)
    said = [user("What is there?")]
    return tokenizer.render(said) != tokenizer.render(said, [_TOOL])


# ---- lengths


def _model_lengths(loaded: Loaded[RunConfig]) -> list[Finding]:
    config = loaded.value
    directory = _model_here(config)
    if directory is None:
        return []
    try:
        facts = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}/config.json cannot be read: {error}") from error
    longest = facts.get("max_position_embeddings") or (facts.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    whose = f"the model's max_position_embeddings {longest}"
    engine = config.engine
    if isinstance(engine, EmbeddedEngine):
        if engine.max_model_len and longest and engine.max_model_len > longest:
            return [
                Finding(
                    "error",
                    "the engine's context is longer than the model's",
                    f"engine.max_model_len {engine.max_model_len} > {whose}",
                    f"set engine.max_model_len to at most {longest}",
                )
            ]
        if engine.max_model_len:
            longest, whose = engine.max_model_len, f"engine.max_model_len {engine.max_model_len}"
        if longest is None or engine.kv_tokens < longest:
            longest, whose = engine.kv_tokens, f"engine.kv_tokens {engine.kv_tokens}"
    return _fits(loaded, longest, whose) if longest else []


def _fits(loaded: Loaded[RunConfig], longest: int, whose: str) -> list[Finding]:
    """What of the config does not fit into the engine's longest context."""
    config, found = loaded.value, []
    if config.batch.seq_len > longest:
        # Asked for, it is a wish that cannot come true; as the default, it only leaves room.
        asked = loaded.provenance.get("batch.seq_len", "default") != "default"
        found.append(
            Finding(
                "error" if asked else "warning",
                "samples cannot become as long as the trainer takes them",
                f"batch.seq_len {config.batch.seq_len} > {whose}",
                f"set batch.seq_len to {longest}, or give the engine a longer context",
            )
        )
    for kind, sections in (("env", config.env), ("eval", config.eval)):
        for section in sections:
            sampling = section.sampling.over(config.sampling)
            if sampling.max_tokens >= longest:
                found.append(
                    Finding(
                        "error",
                        f"{kind} {section.label!r}: one answer may fill the whole context",
                        f"sampling.max_tokens {sampling.max_tokens} >= {whose}",
                        "lower sampling.max_tokens, or give the engine a longer context",
                    )
                )
            context = section.limits.max_context
            if context is not None and context > longest:
                found.append(
                    Finding(
                        "error",
                        f"{kind} {section.label!r}: its contexts do not fit the engine",
                        f"limits.max_context {context} > {whose}",
                        f"set limits.max_context to at most {longest}",
                    )
                )
    if not found:
        return [Finding("ok", "lengths", f"batch.seq_len {config.batch.seq_len} and max_tokens fit {whose}")]
    return found


# ---- what is imported


def _packages(config: RunConfig) -> list[Finding]:
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


def _env_check(config: RunConfig, section: EnvSection | EvalSection) -> Callable[[], list[Finding]]:
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
        else:
            with _ONE_IMPORTS:
                environment_class(section.id)
            environment = make_environment(section.id, section.args)
            try:
                check_group(section, environment)
                source = tasks_of(environment, split, section.label)
                size = source.size
                found += prompt_findings(config, section, environment, source, _model_here(config))
                declares_tools = declares_tools_of(environment)
                name = type(environment).__name__
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
        if declares_tools and _has_tool_support(config) is False:
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


def _algorithms(config: RunConfig) -> list[Finding]:
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


def _services(config: RunConfig) -> list[Finding]:
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


# ---- the machine


def _run_dir(config: RunConfig) -> list[Finding]:
    wanted = Path(config.run.dir).expanduser().absolute()
    existing = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            Finding(
                "error",
                "the run directory cannot be written",
                f"run.dir is {wanted}; {existing} is {'not writable' if existing.is_dir() else 'no directory'}",
                "choose another run.dir",
            )
        ]
    free, needed = shutil.disk_usage(existing).free, max(_disk_needed(config), _SMALL_DISK)
    facts = f"{free / 1e9:.1f} GB free at {existing}, about {needed / 1e9:.1f} GB needed"
    if free < needed:
        return [
            Finding(
                "error" if free < _SMALL_DISK else "warning",
                "the disk may fill up during the run",
                facts,
                "free some, choose another run.dir, or lower checkpoint.keep_last",
            )
        ]
    return [Finding("ok", "run directory", facts)]


def _disk_needed(config: RunConfig) -> int:
    """Weights and checkpoints that are kept at one time; rollouts are small beside them."""
    from paceline.cli.trainer import versions_kept

    try:
        directory = local_model_dir(config.model.name)
    except PacelineError:
        return 0
    if directory is None or not isinstance(config.trainer, ReferenceTrainer):
        return 0
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    kept = versions_kept(config)
    # A checkpoint holds float32 weights and two moments of the optimizer.
    return weights * (min(kept, config.run.max_steps) + 6 * (config.checkpoint.keep_last + 1))


def _ports(config: RunConfig) -> list[Finding]:
    section = config.metrics.prometheus
    if section is None:
        return []
    from paceline.observe.sinks import TOKEN_VARIABLE, is_loopback

    if not is_loopback(section.host) and not os.environ.get(TOKEN_VARIABLE):
        return [
            Finding(
                "error",
                "the metrics endpoint would be open to other machines",
                f"metrics.prometheus.host is {section.host!r}, and {TOKEN_VARIABLE} is not set",
                f"set {TOKEN_VARIABLE} to a token that scrapers bring, or listen on 127.0.0.1",
            )
        ]
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((section.host, section.port))
        except OSError as error:
            return [
                Finding(
                    "error",
                    "the port of the metrics endpoint cannot be used",
                    f"metrics.prometheus {section.host}:{section.port}: {error.strerror}",
                    "choose another metrics.prometheus.port, or 0 for a free one",
                )
            ]
    told = f"{section.host}:{section.port} is free" if section.port else f"any free one of {section.host}"
    return [Finding("ok", "ports", told)]


# ---- servers


def _server_check(
    loaded: Loaded[RunConfig], section: VllmEngine | SglangEngine, url: str, probe_s: float
) -> Check:
    async def check() -> list[Finding]:
        from paceline.engines import sglang
        from paceline.engines.http import Limits, Link, Retry, probe

        key = os.environ.get(section.api_key_env) if section.api_key_env else None
        if section.api_key_env and not key:
            raise ConfigError(
                f"engine.api_key_env names {section.api_key_env}, which is not set: set it to the server's key"
            )
        limits = Limits(admin_s=probe_s, metrics_s=probe_s, connect_s=probe_s)
        link = Link(url, f"engine {url}", limits, Retry(attempts=1), key)
        try:
            look = sglang.probe if isinstance(section, SglangEngine) else probe
            facts = await look(link, loaded.value.model.served_name, start_s=_PROBE_S)
        except PacelineError as error:
            return [
                Finding(
                    "error", f"engine {url} cannot be used", str(error), "start it, or correct engine.urls"
                )
            ]
        finally:
            await link.close()
        return _server_findings(loaded, url, facts)

    return check


def _server_findings(loaded: Loaded[RunConfig], url: str, facts: ServerFacts) -> list[Finding]:
    config = loaded.value
    found = [
        Finding("error", f"engine {url} cannot be used", problem.text, problem.remedy)
        for problem in facts.problems
    ]
    scaled = [env for env in config.env if env.sampling.over(config.sampling).temperature != 1.0]
    if facts.processed_logprobs is False and scaled:
        temperatures = ", ".join(
            f"{env.label!r} samples at temperature {env.sampling.over(config.sampling).temperature:g}"
            for env in scaled
        )
        found.append(
            Finding(
                "error",
                f"engine {url} returns logprobs of the raw distribution, not of the one sampled from",
                f"env {temperatures}; the server's logprobs do not move with it",
                f"{facts.remedies.processed}, or sample at temperature 1",
            )
        )
    if facts.processed_logprobs is None and scaled and not facts.problems:
        found.append(
            Finding(
                "warning",
                f"engine {url}: whether its logprobs follow the temperature could not be told",
                remedy=f"make sure of it: {facts.remedies.processed}",
            )
        )
    if not facts.can_pause and not facts.problems:  # one that is paused can be
        found.append(
            Finding(
                "error",
                f"engine {url} cannot be paused, so it cannot take new weights",
                "it does not have the routes",
                facts.remedies.pause,
            )
        )
    if not facts.has_metrics:
        found.append(
            Finding(
                "warning",
                f"engine {url} has no /metrics",
                "admission cannot see how full it is",
                facts.remedies.metrics,
            )
        )
    if loaded.value.engine.type == "vllm" and loaded.value.engine.router == url:
        found.append(
            Finding(
                "warning",
                f"engine {url} is a router whose servers are not known",
                "admission goes by latency alone, and pauses and weights must be passed on to every server",
                "name the servers in engine.urls",
            )
        )
    if facts.max_model_len:
        found += [
            finding
            for finding in _fits(loaded, facts.max_model_len, f"{url}'s max_model_len {facts.max_model_len}")
            if finding.level != "ok"
        ]
    if found:
        return found
    context, kv = facts.max_model_len or "unknown", facts.kv_tokens or "unknown"
    return [Finding("ok", f"engine {url}", f"{facts.route}, context {context}, KV cache {kv} tokens")]


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For scripts."""
    return [{name: getattr(finding, name) for name in finding.__struct_fields__} for finding in findings]
