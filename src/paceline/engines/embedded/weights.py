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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a weight directory must hold, by its Hugging Face name."""
        d, f, q, kv = (
            self.hidden_size,
            self.intermediate_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        linears = {
            "self_attn.q_proj": (q, d, self.qkv_bias),
            "self_attn.k_proj": (kv, d, self.qkv_bias),
            "self_attn.v_proj": (kv, d, self.qkv_bias),
            "self_attn.o_proj": (d, q, self.out_bias),
            "mlp.gate_proj": (f, d, self.mlp_bias),
            "mlp.up_proj": (f, d, self.mlp_bias),
            "mlp.down_proj": (d, f, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
        }
        layer |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _bias) in linears.items()}
        layer |= {f"{name}.bias": (rows,) for name, (rows, _columns, bias) in linears.items() if bias}
        if self.qk_norm:
            layer |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        shapes = {
            f"model.layers.{n}.{name}": shape for n in range(self.layers) for name, shape in layer.items()
        }
        shapes |= {"model.embed_tokens.weight": (self.vocab_size, d), "model.norm.weight": (d,)}
        return shapes if self.is_tied else {**shapes, "lm_head.weight": (self.vocab_size, d)}


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


def read_tensors(directory: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """All tensors of `directory`, checked by name, shape and finiteness; WireError says which one is wrong.

    A tensor that is absent, extra or of another shape means other weights than the caller thinks, so
    nothing is ever filled in or skipped, but for what transformers writes redundantly.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted({directory / name for name in read_json(index)["weight_map"].values()})
    else:
        single = directory / "model.safetensors"
        files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise WireError(f"{directory} holds no *.safetensors file")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise WireError(f"cannot read weights {file}: {error}") from error
    wanted = spec.shapes()
    for name, shape in wanted.items():
        if name not in found:
            raise WireError(f"{directory} lacks tensor {name} of shape {list(shape)}")
        if tuple(found[name].shape) != shape:
            raise WireError(
                f"{directory}: tensor {name} has shape {list(found[name].shape)}, expected {list(shape)}"
            )
        if not bool(torch.isfinite(found[name]).all()):
            raise WireError(f"{directory}: tensor {name} holds values that are not finite")
    redundant = {"lm_head.weight"} if spec.is_tied else set()
    for name in found.keys() - wanted.keys() - redundant:
        if not name.endswith("rotary_emb.inv_freq"):
            raise WireError(f"{directory} holds tensor {name}, which a {spec.model_type} model does not have")
    return {name: found[name] for name in wanted}


def read_weights(directory: Path, like: ModelSpec) -> dict[str, Tensor]:
    """Weights to take the place of others, so of the same spec; a directory without config.json is trusted in that."""
    if (directory / "config.json").exists():
        own, theirs = asdict(like), asdict(ModelSpec.read(directory))
        for name in own:
            if own[name] != theirs[name]:
                raise WireError(f"{directory}: {name} is {theirs[name]}, but this engine runs {own[name]}")
    return read_tensors(directory, like)
