"""From logits to tokens, and the log-probability that the trainer will divide by.

The logprob of a token is that under the distribution it was drawn from: after temperature, min-p, top-k
and top-p (vLLM's `--logprobs-mode processed_logprobs`). Greedy rows (temperature 0) report the unscaled
softmax, since a point mass would say nothing.

A draw inverts the cumulative distribution at a number that depends on (seed, position in the sequence)
and on nothing else. So a sequence does not depend on its batch mates, and one that is cut into several
requests with the same seed continues as if it had not been.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-5  # vLLM's threshold: a smaller temperature overflows the logits


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """As in vLLM, names and defaults. ValueError names a value that cannot be honoured."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # Accepted at their neutral value only, so that a vLLM client need not strip them.
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        neutral_only = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        for name, neutral in neutral_only.items():
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not supported by the embedded engine: leave it {neutral}"
                )
        bounds: dict[str, bool] = {
            "max_tokens must be at least 1": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens must be at least 0": self.min_tokens >= 0,
            "min_tokens must not exceed max_tokens": self.max_tokens is None
            or self.min_tokens <= self.max_tokens,
            "temperature must be at least 0 and finite": 0 <= self.temperature < float("inf"),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be at least 1, or 0 or -1 for no limit": self.top_k >= -1,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "logprobs must be 0 or 1 (the sampled token's is returned)": self.logprobs in (None, 0, 1),
            "stop must not hold an empty string": "" not in self.stop_strings,
        }
        for message, holds in bounds.items():
            if not holds:
                raise ValueError(message)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off the distribution, which needs a sort."""
        return (self.top_p < 1 or self.top_k > 0 or self.min_p > 0) and not self.is_greedy


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's mixer (OOPSLA 2014): a bijection whose outputs for 0, 1, 2.. pass as random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1 - 2**-48] for each (seed, position): 48 bits, so that rounding never gives 1."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = splitmix64(np.array(seeds, dtype=np.uint64) + golden)
    mixed = splitmix64(key + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * golden)
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def sample(
    logits: Tensor, params: Sequence[SamplingParams], noise: NDArray[np.float64], tile: int = 1
) -> tuple[list[int], list[float]]:
    """Draw one token a row of float32 `logits` [rows, vocab]; returns ids and their logprobs. Rows of which some of the
    distribution is cut off are taken in multiples of `tile`."""
    greedy = [p.is_greedy for p in params]
    if any(p.temperature != 1.0 and not p.is_greedy for p in params):
        logits = logits / torch.tensor([1.0 if p.is_greedy else p.temperature for p in params]).unsqueeze(1)
    truncated = [row for row, p in enumerate(params) if p.truncates]
    if truncated:
        logits = logits.clone()
        rows = truncated + truncated[:1] * (-len(truncated) % tile)
        logits[truncated] = _truncate(logits[rows], [params[row] for row in rows])[: len(truncated)]
    logprobs = torch.log_softmax(logits, dim=-1)
    if all(greedy):
        drawn = logprobs.argmax(dim=-1, keepdim=True)
    else:
        # Doubles: over a large vocabulary, float32 sums would lose the tail.
        mass = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.searchsorted(mass, torch.from_numpy(noise).unsqueeze(1) * mass[:, -1:], right=True)
        if any(greedy):
            drawn = torch.where(
                torch.tensor(greedy).unsqueeze(1), logprobs.argmax(dim=-1, keepdim=True), drawn
            )
    # Of logits that are not finite nothing can be drawn. The logprob says so, and whoever asked refuses it.
    drawn = drawn.clamp(max=logprobs.shape[1] - 1)
    ids: list[int] = drawn.squeeze(1).tolist()
    chosen: list[float] = logprobs.gather(1, drawn).squeeze(1).tolist()
    return ids, chosen


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf outside min-p, then top-k, then top-p of what is left; the best token always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1])
    floor = torch.tensor([p.min_p for p in params]).unsqueeze(1)
    most = torch.tensor([p.top_k if p.top_k > 0 else logits.shape[-1] for p in params]).unsqueeze(1)
    share = torch.tensor([p.top_p for p in params]).unsqueeze(1)
    cut = ((ordered - ordered[:, :1]).exp() < floor) | (rank >= most)
    ordered = ordered.masked_fill(cut, float("-inf"))
    probs = ordered.softmax(dim=-1)
    cut = (probs.cumsum(dim=-1) - probs >= share) & (rank > 0) & (share < 1)
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(cut, float("-inf")))
