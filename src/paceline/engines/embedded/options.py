"""What the engine can be told: one list for its command line, for starting it from Python, and for itself."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

TOKEN_VARIABLE = "PACELINE_ENGINE_TOKEN"


def _option(default: Any, help: str, **argparse_settings: Any) -> Any:
    return field(default=default, metadata={"help": help, **argparse_settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """ConfigError if a value cannot work."""

    model: str | Path = field(
        metadata={"help": "Hugging Face directory: config.json, *.safetensors, tokenizer.json"}
    )
    host: str = _option("127.0.0.1", "address to listen on; any but loopback needs a token")
    port: int = _option(0, "port to listen on; 0 takes a free one and reports it", type=int)
    token: str | None = _option(
        None,
        "Bearer token that requests must bring; all users of the machine can read a command line, so rather set "
        f"{TOKEN_VARIABLE}, or name a --token-file",
    )
    kv_tokens: int = _option(65536, "capacity of the KV cache, in tokens", type=int)
    block_size: int = _option(16, "tokens in a block, the unit of prefix sharing", type=int)
    max_num_seqs: int = _option(64, "sequences computed at the same time; the others wait", type=int)
    max_batched_tokens: int = _option(
        512, "tokens computed in one step; longer prompts go in chunks", type=int
    )
    max_model_len: int | None = _option(
        None, "prompt plus output; unset, what model and cache allow", type=int
    )
    dtype: str = _option("float32", "of weights, KV cache and arithmetic", choices=("float32", "bfloat16"))
    batch_invariant: bool = _option(
        False,
        "logits of a token to the last bit the same, whoever shares its step; slower",
        action="store_true",
    )
    seed: int = _option(0, "of requests that bring none", type=int)
    served_model_name: str = _option("policy", "the model that requests may name")
    weight_version: str = _option("default", "label of the weights it starts with")

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size", "max_num_seqs", "max_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}: it must be float32 or bfloat16")
        if self.batch_invariant and self.dtype != "float32":
            raise ConfigError(f"batch_invariant is kept in float32 only, and dtype is {self.dtype}")
        if not self.token and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} is not loopback, so requests need a token: set {TOKEN_VARIABLE}"
            )

    def arguments(self) -> list[str]:
        """The command line that gives these options; the token is left out, for all users can read it there."""
        given = [(f.name.replace("_", "-"), getattr(self, f.name)) for f in fields(self) if f.name != "token"]
        words: list[str] = []
        for name, value in given:
            if value is True:
                words.append(f"--{name}")
            elif value is not None and value is not False:
                words += [f"--{name}", str(value)]
        return words

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="python -m paceline.engines.embedded")
        cls.add_arguments(parser)
        return parser

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Every option as a flag of `parser`."""
        parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        for f in fields(cls):
            is_model = f.name == "model"
            default = None if is_model else f.default
            name = f"--{f.name.replace('_', '-')}"
            parser.add_argument(name, required=is_model, default=default, **f.metadata)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: only this one is known without asking the network
        return host == "localhost"
