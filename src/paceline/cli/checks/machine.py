"""Whether this machine has the room and the ports that a config needs."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

from paceline.cli.checks.model import local_model_dir, model_here
from paceline.cli.open_files import allow_open_files
from paceline.config import EmbeddedEngine, FixedAdmission, ReferenceTrainer, RunConfig
from paceline.core.capacity import kv_shape_of
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.doctor import Finding

_SMALL_DISK = 512 * 2**20
_FILES = 128
"""Open in a run beside the calls in flight: journal, rollouts, pipes of processes, sockets of the loop."""


def run_dir(config: RunConfig) -> list[Finding]:
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


def memory(config: RunConfig) -> list[Finding]:
    """What engines of our own and the reference trainer hold at least: what is computed with for a while comes on top."""
    engine, directory = config.engine, model_here(config)
    if not isinstance(engine, EmbeddedEngine) or directory is None:
        return []
    try:
        shape = kv_shape_of(json.loads((directory / "config.json").read_text(encoding="utf-8")), engine.dtype)
    except (OSError, ValueError, ConfigError):
        return []  # a model that the engine cannot run, which it tells with the reason
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    cache = shape.bytes_per_token * engine.kv_tokens
    # Beside its weights a trainer has their gradients, and two moments of each.
    trainer = 4 * weights if isinstance(config.trainer, ReferenceTrainer) else 0
    needed, there = engine.replicas * (weights + cache) + trainer, memory_bytes()
    facts = (
        f"{there / 1e9:.1f} GB here, at least {needed / 1e9:,.1f} GB needed: {engine.replicas} x {cache / 1e9:,.2f} GB for "
        f"engine.kv_tokens = {engine.kv_tokens}, {weights / 1e9:.2f} GB of weights in each engine"
    )
    if trainer:
        facts += f", {trainer / 1e9:.2f} GB in the trainer"
    if needed <= there:
        return [Finding("ok", "memory", facts)]
    remedy = "lower engine.kv_tokens or engine.replicas, or take a machine with more memory"
    return [Finding("error", "the engines and the trainer do not fit into memory", facts, remedy)]


def memory_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return there
    return min(there, int(limit)) if limit.isdigit() else there


def open_files(config: RunConfig) -> list[Finding]:
    """A call in flight holds a connection; where the cap is not known beforehand, as many as any engine would get."""
    allowed = allow_open_files()
    engines = config.engine.replicas if isinstance(config.engine, EmbeddedEngine) else len(config.engine.urls)
    fixed = isinstance(config.admission, FixedAdmission)
    calls = engines * config.admission.cap if isinstance(config.admission, FixedAdmission) else 64 * engines
    needed = _FILES + calls
    facts = (
        f"{allowed:,} allowed, {'' if fixed else 'at least '}{needed:,} needed with {calls:,} calls in flight"
    )
    if allowed >= needed:
        return [Finding("ok", "open files", facts)]
    return [
        Finding(
            "error" if allowed < _FILES else "warning",
            "this process may not have enough files and connections open",
            facts,
            "raise the limit, with `ulimit -Hn` or the LimitNOFILE of a service",
        )
    ]


def ports(config: RunConfig) -> list[Finding]:
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
