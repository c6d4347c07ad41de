"""How long a step of an engine takes, and how much its KV cache holds.

A roofline: a step reads the weights or computes, whichever is slower, with the corner rounded off by a 4-norm; beside
that it reads the KV cache, computes the attention of prefills, and pays for launches and scheduling. The form is that of
trained-physics simulators (BLIS); the efficiencies below follow published measurements, see
`docs/benchmarks/scheduling.md`.
"""

from __future__ import annotations

from math import sqrt

import msgspec

from paceline.errors import ConfigError
from paceline.sim.engine.hardware import GpuSpec, ModelSpec
from paceline.sim.engine.speculation import Speculation


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of the data sheet that real kernels reach, and what comes on top of them."""

    weights: float = 0.86
    """Of the memory bandwidth, when weights are read."""
    kv: float = 0.65
    """Of the memory bandwidth, when the KV cache is read: grouped heads."""
    kv_mha: float = 0.48
    """The same where every query head has its own."""
    compute: float = 0.71
    """Of peak compute, in matrix products."""
    attention: float = 0.45
    """Of peak compute, in attention."""
    layer_s: float = 12e-6
    """Launches of one layer."""
    all_reduce_s: tuple[float, float, float] = (7e-6, 20e-6, 28e-6)
    """One all-reduce over 2, 4, and 8 or more GPUs; a layer has two."""
    step_s: float = 0.6e-3
    """Scheduling of one step."""
    seq_s: float = 3e-6
    """Scheduling and sampling of one sequence in a step."""
    all_to_all_s: float = 50e-6
    """Expert parallel: to send next to nothing to all GPUs and back, in one layer."""
    network_gb_s: float = 50.0
    """Expert parallel: gigabytes a second that one GPU sends, when there is more to send (DeepEP on H800: 44 to 54)."""


class Speed(msgspec.Struct, frozen=True):
    """One engine: capacity, limits, and the constants of its steps, in seconds. The default is an 8B model in bf16 on one
    H100."""

    kv_tokens: int = 380_000
    """Capacity of the KV cache."""
    max_model_len: int = 32_768
    """Longest context."""
    max_num_seqs: int = 256
    """Requests that run together."""
    max_batched_tokens: int = 8192
    """Tokens of one step: one for each decoding request, the rest for prefill."""
    enters_by_chunk: bool = False
    """Whether a request enters when the blocks of its first chunk are free, and is preempted again when the rest find none, as
    in vLLM before its pull request 37307 (March 2026); else when those of its whole context are."""
    block: int = 16
    """Tokens of a KV block."""
    weights_s: float = 5.3e-3
    """To read the weights that every token uses."""
    experts_s: float = 0.0
    """To read all experts; a batch reads the share that it touches."""
    expert_share: float = 0.0
    """Share of the experts that one token uses."""
    token_s: float = 23.7e-6
    """Compute of one token, sampled or prefilled."""
    kv_s: float = 73e-9
    """To read the KV of one token of context."""
    kv_again: float = 1.0
    """What that takes, by `kv_s`, where another sequence of the step has read the same block before: less than 1 where a cache of the
    processor still has it. Engines that pad read no blocks, and save nothing."""
    pads: bool = False
    """Whether a step reads as much for every sequence as for the longest, as engines do whose attention is one product over
    all of them; paged attention does not."""
    attention_s: float = 1.3e-9
    """Compute of prefilling one token against one token of context."""
    overhead_s: float = 1.0e-3
    """Launches and scheduling of a step."""
    exchange_s: float = 0.0
    """To send one token to the experts on other GPUs and back, in all layers."""
    seq_s: float = 3e-6
    """Scheduling and sampling of one sequence in a step."""
    request_s: float = 0.0
    """Taking a request in and answering it, while nothing is computed: small engines serve HTTP with the core that
    computes."""
    speculation: Speculation | None = None
    """How it speculates; None: it does not."""

    def gemm_s(self, batch: int, tokens: float) -> float:
        """Matrix products of a step with `batch` sequences and `tokens` tokens in all, and what they wait for experts."""
        read = self.weights_s
        if self.experts_s:
            read += self.experts_s * (1.0 - (1.0 - self.expert_share) ** max(batch, tokens))
        compute = tokens * self.token_s
        read *= read
        compute *= compute
        return sqrt(sqrt(read * read + compute * compute)) + tokens * self.exchange_s

    def decode_s(self, batch: int) -> float:
        """A step that decodes `batch` sequences, without reading the KV cache."""
        return self.gemm_s(batch, batch) + self.overhead_s + batch * self.seq_s

    def prefill_s(self, cached: int, new: int) -> float:
        """A step of its own that prefills `new` tokens behind `cached` ones."""
        attention = new * (cached + new / 2) * self.attention_s
        return self.gemm_s(1, new) + self.overhead_s + self.seq_s + attention


def speed_of(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    gpus: int = 1,
    slow: float = 1.0,
    efficiency: Efficiency | None = None,
    utilization: float = 0.9,
    activations_gb: float = 1.2,
    expert_parallel: bool = False,
    max_model_len: int = 32_768,
    max_num_seqs: int = 256,
    max_batched_tokens: int = 8192,
    kv_tokens: int | None = None,
) -> Speed:
    """The constants of `model` on `gpus` GPUs that share one copy of the weights (tensor parallel).

    With `expert_parallel` they share the experts alone. Attention is data parallel: each GPU has all other weights, and
    sequences of its own; tokens are sent to their experts and back in each layer. The constants are those of all GPUs
    together, with equally much to do; `ranks` makes those of one of them.

    `slow` stretches every step: the one number to fit for an engine of unknown make. `activations_gb` of each GPU are
    kept free; `kv_tokens` overrides the capacity. ConfigError when the weights do not fit, or there are no experts to spread.
    """
    e = efficiency or Efficiency()
    bandwidth, peak = gpu.bandwidth_tb_s * 1e12, gpu.tflops * 1e12
    kv_bytes = model.kv_bytes_per_token
    experts = model.expert_params
    if expert_parallel and (not experts or model.hidden is None):
        lacks = (
            "is dense, and has no experts" if not experts else "does not say what a token sends them (hidden)"
        )
        raise ConfigError(
            f"expert_parallel spreads experts over the GPUs, but the model {lacks}: leave it out, or add that"
        )
    copies = gpus if expert_parallel else 1
    weights = ((model.params_b * 1e9 - experts) * copies + experts) * model.weight_bytes
    holders = 1 if model.kv_latent is not None and not expert_parallel else gpus
    left = gpus * (gpu.memory_gb * 1e9 * utilization - activations_gb * 1e9) - weights
    capacity = int(left * holders / gpus // kv_bytes) if kv_tokens is None else kv_tokens
    if capacity < 1:
        raise ConfigError(
            f"the weights take {weights / 1e9:.0f} GB, but {gpus} x {gpu.memory_gb:.0f} GB at {utilization:.0%} leave "
            "nothing for the KV cache: take more GPUs an engine"
        )
    read = (model.params_b - model.embedding_b) * 1e9 * model.weight_bytes - experts * model.weight_bytes
    active = (model.active_b or model.params_b) - model.embedding_b
    kv_share = (
        e.kv_mha if model.kv_latent is None and (model.kv_heads or model.heads) == model.heads else e.kv
    )
    kv_s = kv_bytes / (holders * bandwidth * kv_share)
    attention_s = model.attention_flops / (gpus * peak * e.attention)
    if model.kv_latent is not None:
        kv_s = max(kv_s, model.attention_flops / (gpus * peak * e.attention))
    layer_s, exchange_s = e.layer_s, 0.0
    if expert_parallel:
        # To its experts in fp8, and back in bf16, from all GPUs at once.
        sent = model.layers * model.experts_active * (model.hidden or 0) * 3
        layer_s, exchange_s = layer_s + e.all_to_all_s, sent / (gpus * e.network_gb_s * 1e9)
    elif gpus > 1:
        layer_s += 2 * e.all_reduce_s[0 if gpus == 2 else 1 if gpus == 4 else 2]
    return Speed(
        kv_tokens=capacity,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        weights_s=slow * read * copies / (gpus * bandwidth * e.weights),
        experts_s=slow * experts * model.weight_bytes / (gpus * bandwidth * e.weights),
        expert_share=model.experts_active / model.experts if model.experts else 0.0,
        token_s=slow * 2 * active * 1e9 / (gpus * peak * e.compute),
        kv_s=slow * kv_s,
        attention_s=slow * attention_s,
        overhead_s=slow * (model.layers * layer_s + e.step_s),
        exchange_s=slow * exchange_s,
        # Data parallel attention: each GPU schedules its own sequences, beside the others.
        seq_s=slow * e.seq_s / copies,
    )
