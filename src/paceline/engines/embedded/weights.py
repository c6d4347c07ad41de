"""A Hugging Face directory: what kind of model it holds, and its weights, checked before anything uses them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ConfigError, WireError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What decides shapes and arithmetic. Two weight directories are interchangeable if these are equal."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    is_tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """From `config.json`; ConfigError for a model this engine would compute wrongly."""
        config = read_json(directory / "config.json")
        kind = config.get("model_type")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        attention = {"full_attention", *(config.get("layer_types") or ())}
        refusals = {
            f"model_type {kind!r}: it runs llama, qwen2 and qwen3": kind not in ("llama", "qwen2", "qwen3"),
            f"rope type {rope_type!r}": rope_type != "default",
            f"partial_rotary_factor {rotated}": rotated != 1.0,
            "sliding-window attention": attention != {"full_attention"}
            or bool(config.get("use_sliding_window")),
            f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
            "quantized weights": bool(config.get("quantization_config")),
        }
        for what, refused in refusals.items():
            if refused:
                raise ConfigError(
                    f"{directory}: the embedded engine does not support {what}. Use vLLM or SGLang"
                )
        try:
            heads, bias = int(config["num_attention_heads"]), bool(config.get("attention_bias", False))
            return cls(
                model_type=str(kind),
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                intermediate_size=int(config["intermediate_size"]),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
                max_positions=int(config.get("max_position_embeddings", 2048)),
                is_tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=bias or kind == "qwen2",
                out_bias=bias and kind != "qwen2",
                mlp_bias=bool(config.get("mlp_bias", False)),
                qk_norm=kind == "qwen3",
            )
        except KeyError as missing:
            raise ConfigError(f"{directory / 'config.json'} has no {missing}") from missing


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def eos_ids(directory: Path) -> frozenset[int]:
    """Ids that end a sequence: those of `generation_config.json`, which wins as in vLLM, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            found = read_json(directory / name).get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


class Weights:
    """The tensors of a directory, each taken once by whoever knows its name and shape; WireError says which is wrong.

    A tensor that is absent, extra or of another shape means other weights than the caller thinks, so nothing is ever
    filled in or skipped, but for what transformers writes redundantly.
    """

    def __init__(self, directory: Path, like: ModelSpec) -> None:
        """To take the place of others, so of the same spec; a directory without config.json is trusted in that."""
        self._directory, self._spec = directory, like
        if (directory / "config.json").exists():
            own, theirs = asdict(like), asdict(ModelSpec.read(directory))
            for name in own:
                if own[name] != theirs[name]:
                    raise WireError(
                        f"{directory}: {name} is {theirs[name]}, but this engine runs {own[name]}"
                    )
        self._tensors: dict[str, Tensor] = {}
        for file in _files(directory):
            try:
                self._tensors.update(load_file(file))
            except (OSError, SafetensorError) as error:
                raise WireError(f"cannot read weights {file}: {error}") from error

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise WireError(f"{self._directory} lacks tensor {name} of shape {list(shape)}")
        if tensor.shape != shape:
            raise WireError(
                f"{self._directory}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WireError(f"{self._directory}: tensor {name} holds values that are not finite")
        return tensor

    def all_taken(self) -> None:
        """Whoever took them has no use for another."""
        if self._spec.is_tied:
            self._tensors.pop("lm_head.weight", None)
        for name in self._tensors:
            if not name.endswith("rotary_emb.inv_freq"):
                raise WireError(
                    f"{self._directory} holds tensor {name}, which a {self._spec.model_type} model does not have"
                )


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return sorted({directory / name for name in read_json(index)["weight_map"].values()})
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise WireError(f"{directory} holds no *.safetensors file")
    return files
