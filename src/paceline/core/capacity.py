"""The KV arithmetic: how many tokens, and so how many rollouts, fit an engine.

Gigabytes are decimal, as GPUs are sold. An engine keeps a little less than this says: it also needs room for
activations, about 1 to 2 GB, which `reserve_gb` takes off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.errors import ConfigError

DTYPE_BYTES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Gpu(msgspec.Struct, frozen=True):
    """Data-sheet numbers of one GPU."""

    memory_gb: float
    bandwidth_tb_s: float
    tflops: float
    """bf16, dense."""


GPUS: Final[Mapping[str, Gpu]] = {
    "H100": Gpu(80, 3.35, 989),
    "H800": Gpu(80, 3.35, 989),
    "H200": Gpu(141, 4.8, 989),
    "A100-80": Gpu(80, 2.039, 312),
    "A100-40": Gpu(40, 1.555, 312),
    "H20": Gpu(96, 4.0, 148),
}


class KvShape(msgspec.Struct, frozen=True):
    """What a model keeps of each token."""

    layers: int
    """Layers that keep it for the whole context."""
    per_layer: int
    """Numbers a layer keeps: two for each KV head and dimension, or the compressed latent of MLA."""
    dtype_bytes: int
    note: str = ""

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.per_layer * self.dtype_bytes


class Capacity(msgspec.Struct, frozen=True):
    """What fits one engine."""

    bytes_per_token: int
    kv_bytes: float
    """Memory that is left for the KV cache, over all its GPUs."""
    kv_tokens: int

    def rollouts(self, context: int) -> float:
        """Rollouts with contexts of so many tokens that fit together; the whole ones are its floor."""
        return self.kv_tokens / context


def kv_shape(layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", note: str = "") -> KvShape:
    """Of ordinary attention: a key and a value for each KV head."""
    return KvShape(layers, 2 * kv_heads * head_dim, dtype_bytes(dtype), note)


def dtype_bytes(dtype: str) -> int:
    try:
        return DTYPE_BYTES[dtype.removeprefix("torch.")]
    except KeyError:
        raise ConfigError(f"dtype {dtype!r} is not known; there are {', '.join(DTYPE_BYTES)}") from None


def kv_shape_of(config: Mapping[str, Any], kv_dtype: str | None = None) -> KvShape:
    """From a model's `config.json`. ConfigError names the key that is missing."""
    text = config.get("text_config", config)
    dtype = kv_dtype or str(
        text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or "bfloat16"
    )
    layers = _number(text, "num_hidden_layers")
    note = ""
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        whole = sum(kind == "full_attention" for kind in kinds)
        if 0 < whole < len(kinds):
            layers = whole
            note = (
                f"{len(kinds) - whole} of {len(kinds)} layers keep a window or a state only, and are left out"
            )
    if text.get("kv_lora_rank"):
        latent = _number(text, "kv_lora_rank") + int(text.get("qk_rope_head_dim", 0))
        return KvShape(layers, latent, dtype_bytes(dtype), note or "compressed by MLA")
    heads = _number(text, "num_attention_heads")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or _number(text, "hidden_size") // heads)
    return kv_shape(layers, kv_heads, head_dim, dtype, note)


def weight_bytes_of(config: Mapping[str, Any]) -> float:
    """Bytes of the weights of a decoder with gated feed-forward layers, dense or mixture of experts; biases, norms and
    routers are left out (below 1%)."""
    text = config.get("text_config", config)
    width, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    heads = _number(text, "num_attention_heads")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or width // heads)
    attention = 2 * width * head_dim * (heads + kv_heads)
    feed_forward = 3 * width * _number(text, "intermediate_size")
    experts = int(
        text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0
    )
    if experts:
        inner = int(text.get("moe_intermediate_size") or _number(text, "intermediate_size"))
        shared = int(text.get("n_shared_experts") or 0)
        feed_forward = 3 * width * inner * (experts + shared)
    copies = 1 if text.get("tie_word_embeddings") else 2
    parameters = copies * _number(text, "vocab_size") * width + layers * (attention + feed_forward)
    dtype = str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return float(parameters * dtype_bytes(dtype))


def capacity(
    shape: KvShape,
    *,
    memory_gb: float,
    weights_gb: float,
    gpus: int = 1,
    utilization: float = 0.9,
    reserve_gb: float = 0.0,
) -> Capacity:
    """What is left for KV on `gpus` GPUs of `memory_gb` each that share one copy of the weights. ConfigError when
    nothing is."""
    left = (gpus * (memory_gb * utilization - reserve_gb) - weights_gb) * 1e9
    if left < shape.bytes_per_token:
        raise ConfigError(
            f"the weights take {weights_gb:.1f} GB, and {gpus} x {memory_gb:g} GB at {utilization:.0%} are "
            f"{gpus * memory_gb * utilization:.1f} GB: nothing is left for the KV cache; take more GPUs"
        )
    return Capacity(shape.bytes_per_token, left, int(left // shape.bytes_per_token))


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(
            f"config.json has {key} = {value!r}; expected a whole number: give the numbers as options"
        )
    return value
