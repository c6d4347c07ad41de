"""Data sheets of GPUs and models. A study may add its own: `[gpus.NAME]` and `[models.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from paceline.config.base import Section
from paceline.core import capacity


class GpuSpec(Section):
    """One GPU."""

    tflops: float = Field(gt=0)
    """bf16, dense."""
    bandwidth_tb_s: float = Field(gt=0)
    """Of its memory."""
    memory_gb: float = Field(gt=0)
    """What it really has, in decimal gigabytes: one sold as 80 GB reports 79.2 GiB, which are 85."""


class ModelSpec(Section):
    """One model."""

    layers: int = Field(ge=1)
    """Layers."""
    heads: int = Field(ge=1)
    """Query heads of a layer."""
    head_dim: int = Field(default=128, ge=1)
    """Dimension of a head."""
    kv_heads: int | None = Field(default=None, ge=1)
    """KV heads of a layer; none: as many as query heads."""
    kv_latent: int | None = Field(default=None, ge=1)
    """Numbers that MLA keeps of a token in a layer, instead of heads; none: ordinary attention."""
    params_b: float = Field(gt=0)
    """Parameters, in billions."""
    active_b: float | None = Field(default=None, gt=0)
    """Parameters that a token uses, in billions; none: all of them."""
    hidden: int | None = Field(default=None, ge=1)
    """Width of what a layer passes on: what a token sends to experts on other GPUs; only asked for with `expert_parallel`."""
    embedding_b: float = Field(default=0.0, ge=0)
    """Parameters of the input embedding, in billions: kept, but not read in a step."""
    experts: int | None = Field(default=None, ge=2)
    """Experts of a layer; none: a dense model."""
    experts_active: int = Field(default=1, ge=1)
    """Experts that a token uses."""
    weight_bytes: int = Field(default=2, ge=1)
    """Bytes of a parameter: 2 for bf16, 1 for fp8."""
    kv_bytes: int = Field(default=2, ge=1)
    """Bytes of a number in the KV cache."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token of context keeps."""
        a_layer = self.kv_latent or 2 * (self.kv_heads or self.heads) * self.head_dim
        return self.layers * a_layer * self.kv_bytes

    @property
    def expert_params(self) -> float:
        """Parameters in experts: what a batch reads a share of. From the totals: active = rest + experts · k / E."""
        if self.experts is None or self.active_b is None:
            return 0.0
        return (self.params_b - self.active_b) * 1e9 / (1 - self.experts_active / self.experts)

    @property
    def attention_flops(self) -> float:
        """Floating-point operations of one token against one token of context, over all layers."""
        if self.kv_latent is not None:
            return 4.0 * self.layers * self.heads * self.kv_latent
        return 4.0 * self.layers * self.heads * self.head_dim


_REPORTED: Final = 1.0625
"""What a GPU reports, by what it is sold as: 79.2 GiB on one of 80 GB."""

GPUS: Final[Mapping[str, GpuSpec]] = {
    name: GpuSpec(tflops=g.tflops, bandwidth_tb_s=g.bandwidth_tb_s, memory_gb=g.memory_gb * _REPORTED)
    for name, g in capacity.GPUS.items()
}

MODELS: Final[Mapping[str, ModelSpec]] = {
    "qwen3-8b": ModelSpec(layers=36, heads=32, kv_heads=8, params_b=8.2, embedding_b=0.62),
    "qwen2.5-7b": ModelSpec(layers=28, heads=28, kv_heads=4, params_b=7.62, embedding_b=0.54),
    "qwen2.5-14b": ModelSpec(layers=48, heads=40, kv_heads=8, params_b=14.8, embedding_b=0.78),
    "qwen2.5-32b": ModelSpec(layers=64, heads=40, kv_heads=8, params_b=32.8, embedding_b=0.78),
    "qwen2.5-72b": ModelSpec(layers=80, heads=64, kv_heads=8, params_b=72.7, embedding_b=1.25),
    "llama-2-7b": ModelSpec(layers=32, heads=32, kv_heads=32, params_b=6.74, embedding_b=0.13),
    "llama-3.1-70b": ModelSpec(layers=80, heads=64, kv_heads=8, params_b=70.6, embedding_b=1.05),
    "mistral-nemo-12b": ModelSpec(layers=40, heads=32, kv_heads=8, params_b=12.2, embedding_b=0.67),
    "qwen3-30b-a3b": ModelSpec(
        layers=48, heads=32, kv_heads=4, params_b=30.5, active_b=3.3, embedding_b=0.31, experts=128, experts_active=8,
        hidden=2048,
    ),
    "moonlight-16b-a3b": ModelSpec(
        layers=27, heads=16, kv_latent=576, params_b=16.0, active_b=3.0, embedding_b=0.34, experts=64, experts_active=6,
        hidden=2048,
    ),
    "kimi-k2": ModelSpec(
        layers=61, heads=64, kv_latent=576, params_b=1026.0, active_b=32.0, embedding_b=1.17, experts=384,
        experts_active=8, hidden=7168, weight_bytes=1,
    ),
}  # fmt: skip
