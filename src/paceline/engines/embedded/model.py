"""A dense decoder (Llama, Qwen2, Qwen3) over a paged KV cache, from a Hugging Face directory.

One forward pass takes a flat run of tokens of many sequences. Everything but attention is one matrix
product over all of them; attention gathers each sequence's blocks and runs once per group of sequences
that compute a similar number of tokens (all decodes are one group). At the sizes this engine is for, the
cost is the number of torch calls, so weights are fused and transposed at load.

The KV cache is one tensor per layer of shape [2 (K, V), kv_heads, blocks, block_size, head_dim]: one
index_select over rows of a block fetches K and V of all heads, already in the layout bmm wants.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
        d, q, kv, f = (
            self.hidden_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.intermediate_size,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, d),
            "model.norm.weight": (d,),
        }
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        linears = {
            "self_attn.q_proj": (q, d, self.qkv_bias),
            "self_attn.k_proj": (kv, d, self.qkv_bias),
            "self_attn.v_proj": (kv, d, self.qkv_bias),
            "self_attn.o_proj": (d, q, self.out_bias),
            "mlp.gate_proj": (f, d, self.mlp_bias),
            "mlp.up_proj": (f, d, self.mlp_bias),
            "mlp.down_proj": (d, f, self.mlp_bias),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            for name, (rows, columns, has_bias) in linears.items():
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{at}{name}.weight"] = (d,)
            if self.qk_norm:
                for name in ("q_norm", "k_norm"):
                    shapes[f"{at}self_attn.{name}.weight"] = (self.head_dim,)
        return shapes


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


@dataclass(slots=True)
class AttentionGroup:
    """Sequences whose attention runs as one call: `rows` sequences, each padded to `queries` queries."""

    rows: int
    queries: int
    blocks: Tensor
    """Rows of a layer's cache to gather, [2 * kv_heads * rows * blocks each]."""
    mask: Tensor
    """0 where a query sees a key, -inf elsewhere: [rows, queries, keys]."""
    pick: Tensor | None
    """Flat tokens behind each padded query, [rows * queries]; None if the group is the flat run itself."""
    real: Tensor | None
    """Which padded queries are real, in flat order; None with `pick`."""


@dataclass(slots=True)
class Batch:
    """One step's tokens, flat, in the order of `groups`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    """Where each token's K and V go: rows of a layer's cache as [..., head_dim], [tokens, 2 * kv_heads]."""
    groups: list[AttentionGroup]
    last: Tensor | None
    """Flat tokens whose logits are wanted; None for all."""


@dataclass(slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """One set of weights. Immutable, so a swap is the assignment of another one."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, max_len: int, like: ModelSpec | None = None
    ) -> None:
        """`like` is the spec that new weights must fit; a directory with a config.json must agree with it."""
        if like is None or (directory / "config.json").exists():
            self.spec = ModelSpec.read(directory)
        else:
            self.spec = like
        if like is not None and like != self.spec:
            own, theirs = asdict(like), asdict(self.spec)
            wrong = next(f.name for f in fields(like) if own[f.name] != theirs[f.name])
            raise WireError(f"{directory}: {wrong} is {theirs[wrong]}, but this engine runs {own[wrong]}")
        spec, tensors = self.spec, read_tensors(directory, self.spec)

        def take(name: str) -> Tensor:
            return tensors.pop(name).to(dtype)

        def fused(at: str, *names: str) -> Tensor:
            return torch.cat([take(f"{at}{name}.weight") for name in names]).t().contiguous()

        def biases(at: str, *names: str) -> Tensor | None:
            return (
                torch.cat([take(f"{at}{name}.bias") for name in names])
                if f"{at}{names[0]}.bias" in tensors
                else None
            )

        def head_norms(at: str) -> Tensor | None:
            if not spec.qk_norm:
                return None
            return torch.cat(
                [
                    take(f"{at}q_norm.weight").expand(spec.heads, -1),
                    take(f"{at}k_norm.weight").expand(spec.kv_heads, -1),
                ]
            )

        self.embedding = take("model.embed_tokens.weight").contiguous()
        self.head = self.embedding if spec.is_tied else take("lm_head.weight").contiguous()
        self.final_norm = take("model.norm.weight")
        self.layers: list[_Layer] = []
        for layer in range(spec.layers):
            at, attn = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
            self.layers.append(
                _Layer(
                    norm=take(f"{at}input_layernorm.weight"),
                    qkv=fused(attn, "q_proj", "k_proj", "v_proj"),
                    qkv_bias=biases(attn, "q_proj", "k_proj", "v_proj"),
                    qk_norm=head_norms(attn),
                    out=fused(attn, "o_proj"),
                    out_bias=biases(attn, "o_proj"),
                    mlp_norm=take(f"{at}post_attention_layernorm.weight"),
                    gate_up=fused(at, "mlp.gate_proj", "mlp.up_proj"),
                    gate_up_bias=biases(at, "mlp.gate_proj", "mlp.up_proj"),
                    down=fused(at, "mlp.down_proj"),
                    down_bias=biases(at, "mlp.down_proj"),
                )
            )
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        angles = torch.arange(max_len).float()[:, None] * (1.0 / spec.rope_theta**half)
        cos, sin = angles.cos(), angles.sin()
        # rotate_half(x) * sin == roll(x, head_dim / 2) * [-sin, sin]: one call less per layer.
        self.rope = torch.cat([cos, cos, -sin, sin], dim=-1).to(dtype)

    def forward(self, batch: Batch, cache: list[Tensor]) -> Tensor:
        """Write the batch's K and V into `cache`, return float32 logits [wanted tokens, vocab]."""
        spec = self.spec
        width, rotated, half = (spec.hidden_size,), spec.heads + spec.kv_heads, spec.head_dim // 2
        x = self.embedding.index_select(0, batch.ids)
        rope = self.rope.index_select(0, batch.positions).unsqueeze(1)
        cos, sin = rope[..., : spec.head_dim], rope[..., spec.head_dim :]
        for layer, kv in zip(self.layers, cache, strict=True):
            qkv = _linear(F.rms_norm(x, width, layer.norm, spec.norm_eps), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                torch.mul(F.rms_norm(qk, (spec.head_dim,), None, spec.norm_eps), layer.qk_norm, out=qk)
            turned = qk.roll(half, -1)
            qk.mul_(cos).addcmul_(turned, sin)
            # All writes come before all reads, so sequences that arrive together share a prefix in one step.
            kv.view(-1, spec.head_dim).index_put_((batch.slots,), qkv[:, spec.heads :])
            seen = self._attend(qkv[:, : spec.heads], batch.groups, kv)
            x = _add_linear(x, seen, layer.out, layer.out_bias)
            wide = _linear(
                F.rms_norm(x, width, layer.mlp_norm, spec.norm_eps), layer.gate_up, layer.gate_up_bias
            )
            gate, up = wide.chunk(2, dim=-1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        if batch.last is not None:
            x = x.index_select(0, batch.last)
        return F.linear(F.rms_norm(x, width, self.final_norm, spec.norm_eps), self.head).float()

    def _attend(self, q: Tensor, groups: list[AttentionGroup], kv: Tensor) -> Tensor:
        spec, out, start = self.spec, [], 0
        rows_of_blocks = kv.view(-1, kv.shape[-2] * kv.shape[-1])
        for group in groups:
            if group.pick is None:
                part = q[start : start + group.rows * group.queries]
                start += group.rows * group.queries
            else:
                part = q.index_select(0, group.pick)
            k, v = rows_of_blocks.index_select(0, group.blocks).view(
                2, spec.kv_heads * group.rows, -1, spec.head_dim
            )
            seen = _attention(
                part.view(group.rows, group.queries, spec.kv_heads, -1, spec.head_dim), k, v, group.mask
            )
            if group.real is not None:
                seen = seen.index_select(0, group.real)
                start += seen.shape[0]
            out.append(seen)
        return out[0] if len(out) == 1 else torch.cat(out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = torch.addmm(x, y, weight)
    return x if bias is None else x + bias


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [rows, queries, kv_heads, q_per_kv, head_dim], k and v [kv_heads * rows, keys, head_dim] ->
    [rows * queries, heads * head_dim]. Query heads that share a KV head are folded into its queries."""
    rows, queries, kv_heads, per_kv, head_dim = q.shape
    folded = q.permute(2, 0, 3, 1, 4).reshape(kv_heads * rows, per_kv * queries, head_dim)
    keys = k.shape[1]
    if queries == 1 and q.dtype == torch.float32:
        # Three batched products beat the fused kernel at one query a sequence (100 against 184 us at 32 rows).
        bias = mask.expand(kv_heads, rows, 1, keys).reshape(kv_heads * rows, 1, keys)
        scores = torch.baddbmm(bias, folded, k.transpose(1, 2), alpha=1.0 / math.sqrt(head_dim))
        seen = torch.bmm(torch.softmax(scores, dim=-1), v)
    else:
        shape = (kv_heads, rows, per_kv * queries, head_dim)
        bias = mask.repeat(1, per_kv, 1).unsqueeze(0)
        seen = F.scaled_dot_product_attention(
            folded.view(shape),
            k.view(kv_heads, rows, keys, head_dim),
            v.view(kv_heads, rows, keys, head_dim),
            bias,
        )
    return (
        seen.view(kv_heads, rows, per_kv, queries, head_dim)
        .permute(1, 3, 0, 2, 4)
        .reshape(rows * queries, -1)
    )
