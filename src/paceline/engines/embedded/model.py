"""A dense decoder (Llama, Qwen2, Qwen3) over a paged KV cache, from a Hugging Face directory.

One forward pass takes a flat run of tokens of many sequences. Everything but attention is one matrix
product over all of them; attention gathers each sequence's blocks and runs once per group of sequences
that compute a similar number of tokens (all decodes are one group). At the sizes this engine is for, the
cost is the number of torch calls, so weights are fused and transposed at load.

The KV cache is one tensor per layer of shape [2 (K, V), kv_heads, blocks, block_size, head_dim]: one
index_select over rows of a block fetches K and V of all heads, already in the layout bmm wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engines.embedded.weights import ModelSpec, Weights


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
class _Linear:
    """Layers of the same input, side by side."""

    weight: Tensor
    """Transposed, [in, out]."""
    bias: Tensor | None
    tile: int | None = None
    """Rows of each product, of which there are then a multiple; None takes all at once."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.tile is not None:
            return torch.cat([self._of(part) for part in torch.split(x, self.tile)])
        return self._of(x)

    def _of(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.tile is not None:
            return residual + self(x)
        residual = torch.addmm(residual, x, self.weight)
        return residual if self.bias is None else residual + self.bias


@dataclass(slots=True)
class _Layer:
    norm: Tensor
    qkv: _Linear
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]"""
    out: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


class Decoder:
    """One set of weights. Immutable but for room to work in, so a swap is the assignment of another one."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, max_len: int, tile: int | None = None
    ) -> None:
        """Takes what it needs of `weights`; WireError if that is not exactly what is there. `tile`: rows of every matrix
        product; `forward` then takes tokens, and wanted ones, in multiples of it."""
        self.spec = spec
        d, f, q, kv = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.heads * spec.head_dim,
            spec.kv_heads * spec.head_dim,
        )

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(name, *shape).to(dtype).contiguous()

        def linear(rows: dict[str, int], columns: int, has_bias: bool) -> _Linear:
            """Layers of these names and rows, side by side."""
            weight = torch.cat([take(f"{name}.weight", count, columns) for name, count in rows.items()])
            bias = (
                torch.cat([take(f"{name}.bias", count) for name, count in rows.items()]) if has_bias else None
            )
            return _Linear(weight.t().contiguous(), bias, tile)

        def qk_norm(attn: str) -> Tensor:
            norms = {"q_norm": spec.heads, "k_norm": spec.kv_heads}
            return torch.cat(
                [take(f"{attn}.{n}.weight", spec.head_dim).expand(heads, -1) for n, heads in norms.items()]
            )

        def layer(at: str) -> _Layer:
            attn, mlp = f"{at}.self_attn", f"{at}.mlp"
            qkv = {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}
            return _Layer(
                norm=take(f"{at}.input_layernorm.weight", d),
                qkv=linear(qkv, d, spec.qkv_bias),
                qk_norm=qk_norm(attn) if spec.qk_norm else None,
                out=linear({f"{attn}.o_proj": d}, q, spec.out_bias),
                mlp_norm=take(f"{at}.post_attention_layernorm.weight", d),
                gate_up=linear({f"{mlp}.gate_proj": f, f"{mlp}.up_proj": f}, d, spec.mlp_bias),
                down=linear({f"{mlp}.down_proj": d}, f, spec.mlp_bias),
            )

        self.embedding = take("model.embed_tokens.weight", spec.vocab_size, d)
        self.final_norm = take("model.norm.weight", d)
        self.head = self.embedding if spec.is_tied else take("lm_head.weight", spec.vocab_size, d)
        self._to_logits = _Linear(self.head.t(), None, tile)
        self.layers = [layer(f"model.layers.{index}") for index in range(spec.layers)]
        weights.all_taken()
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        angles = torch.arange(max_len).float()[:, None] * (1.0 / spec.rope_theta**half)
        cos, sin = angles.cos(), angles.sin()
        # rotate_half(x) * sin == roll(x, head_dim / 2) * [-sin, sin]: one call less per layer.
        self.rope = torch.cat([cos, cos, -sin, sin], dim=-1).to(dtype)
        self._gathered = torch.empty(0, dtype=dtype)
        """Room for `_gather`."""

    def forward(self, batch: Batch, cache: list[Tensor]) -> Tensor:
        """Write the batch's K and V into `cache`, return float32 logits [wanted tokens, vocab]."""
        spec, x = self.spec, self.embedding.index_select(0, batch.ids)
        width, eps, rotated = (spec.hidden_size,), spec.norm_eps, spec.heads + spec.kv_heads
        rope = self.rope.index_select(0, batch.positions).unsqueeze(1)
        cos, sin = rope[..., : spec.head_dim], rope[..., spec.head_dim :]
        for layer, kv in zip(self.layers, cache, strict=True):
            qkv = layer.qkv(F.rms_norm(x, width, layer.norm, eps))
            qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                torch.mul(F.rms_norm(qk, (spec.head_dim,), None, eps), layer.qk_norm, out=qk)
            turned = qk.roll(spec.head_dim // 2, -1)
            qk.mul_(cos).addcmul_(turned, sin)
            # All writes come before all reads, so sequences that arrive together share a prefix in one step.
            kv.view(-1, spec.head_dim).index_put_((batch.slots,), qkv[:, spec.heads :])
            x = layer.out.add_to(x, self._attend(qkv[:, : spec.heads], batch.groups, kv))
            gate, up = layer.gate_up(F.rms_norm(x, width, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = layer.down.add_to(x, F.silu(gate).mul_(up))
        if batch.last is not None:
            x = x.index_select(0, batch.last)
        return self._to_logits(F.rms_norm(x, width, self.final_norm, eps)).float()

    def _attend(self, q: Tensor, groups: list[AttentionGroup], kv: Tensor) -> Tensor:
        out, start, head_dim, kv_heads = [], 0, self.spec.head_dim, self.spec.kv_heads
        cached = kv.view(-1, kv.shape[-2] * head_dim)
        for group in groups:
            end = start + (group.rows * group.queries if group.real is None else group.real.shape[0])
            part = q[start:end] if group.pick is None else q.index_select(0, group.pick)
            part = part.view(group.rows, group.queries, kv_heads, -1, head_dim)
            k, v = self._gather(cached, group.blocks).view(2, kv_heads * group.rows, -1, head_dim)
            seen = _attention(part, k, v, group.mask)
            out.append(seen if group.real is None else seen.index_select(0, group.real))
            start = end
        return out[0] if len(out) == 1 else torch.cat(out)

    def _gather(self, cached: Tensor, blocks: Tensor) -> Tensor:
        """These rows of a layer's cache, until the next call."""
        # Of more than 32 MB, malloc takes every page from the system anew and gives it back, for each layer of a step:
        # that cost more than all else together (16 contexts of 1,900 tokens: 377 ms a step; so: 97).
        needed = blocks.shape[0] * cached.shape[1]
        if self._gathered.shape[0] < needed:
            self._gathered = cached.new_empty(needed + needed // 4)
        out = self._gathered[:needed].view(blocks.shape[0], -1)
        return torch.index_select(cached, 0, blocks, out=out)


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
