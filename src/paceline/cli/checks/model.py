"""Whether the model is there, its chat template works, and lengths fit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import EmbeddedEngine, RunConfig
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.doctor import Finding

if TYPE_CHECKING:
    from paceline.config.load import Loaded

_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


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


def model_here(config: RunConfig) -> Path | None:
    """The model's directory, for checks that look into it; None where there is nothing to look at. If it is wrong,
    `model` says so."""
    try:
        directory = local_model_dir(config.model.name)
    except PacelineError:
        return None
    return directory if directory is not None and (directory / "config.json").is_file() else None


def model(config: RunConfig) -> list[Finding]:
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


def template(config: RunConfig) -> list[Finding]:
    from paceline.tokens import ChatTokenizer, probe_append_only, user

    directory = model_here(config)
    if directory is None:
        return []
    tokenizer = ChatTokenizer.load(directory, config.model.chat_template)
    tokenizer.encode(tokenizer.render([user("What is 1 + 1?")]))
    append_only = probe_append_only(tokenizer)
    return [Finding("ok" if append_only.holds else "warning", "chat template", append_only.summary)]


def has_tool_support(config: RunConfig) -> bool | None:
    """Whether the template renders a tool list; None when there is no template to try."""
    from paceline.tokens import ChatTokenizer, user

    directory = model_here(config)
    if directory is None:
        return None
    tokenizer = ChatTokenizer.load(directory, config.model.chat_template)
    said = [user("What is there?")]
    return tokenizer.render(said) != tokenizer.render(said, [_TOOL])


def lengths(loaded: Loaded[RunConfig]) -> list[Finding]:
    config = loaded.value
    directory = model_here(config)
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
    return fits(loaded, longest, whose) if longest else []


def fits(loaded: Loaded[RunConfig], longest: int, whose: str) -> list[Finding]:
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
