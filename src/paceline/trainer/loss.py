"""The policy-gradient loss of trainable tokens, and what it says about the distance to the sampler.

With r = exp(logprob now - logprob when sampled) and A the advantage, a token's loss is

    ppo     -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)           (arXiv:1707.06347)
    dppo    -r A, and no gradient once the probability itself has moved by more than clip_high in the
            direction A wants (clip_low downwards). A rare token's ratio is large before its probability
            has moved at all, and a common one's the other way round; this bounds what matters.

plus kl times the k3 estimate of KL(policy | reference): exp(d) - d - 1 with d = ref_logprob - logprob. The
reference is `ref_logprobs` where the batch carries them, else the sampling policy.

A step's loss is the sum over all its trainable tokens divided by their number: one mean over the whole global
batch, whatever the packing. Tokens that were not sampled but carry a `likelihood_weights` (what an environment said)
add their weight times -logprob, at temperature 1, and leave the divisor alone as well. `loss_weights` multiply a token's loss and leave the divisor alone, so a weight of 0
is worth a token that had nothing to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.trainer.batch import Tokens

_LARGEST_LOG_RATIO = 20.0
"""exp(20) is 5e8: past it a ratio is a fault upstream, and must show in the metrics, not as infinity."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    kind: Literal["ppo", "dppo"] = "dppo"
    clip_low: float = 0.2
    """How far below 1 the ratio (for dppo: how far down the probability) may move."""
    clip_high: float = 0.2
    """How far above 1 the ratio (for dppo: how far up the probability) may move."""
    kl: float = 0.0
    """Weight of the KL term."""


@dataclass(slots=True)
class Diagnostics:
    """Sums over tokens, added up micro-batch by micro-batch; `means` reads them out."""

    tokens: int = 0
    loss: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    kl_reference: float = 0.0
    logprob_gap_max: float = 0.0

    def add(self, other: Diagnostics) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name.endswith("_max") else mine + theirs)

    def means(self) -> dict[str, float]:
        """Per-token means. `mismatch_kl` (k3) and `mismatch_k1` estimate KL(sampler | trainer) on sampled tokens:
        the first is never negative, the second is unbiased and noisier. `ess` is the effective share of the
        tokens under the importance ratios: 1 on-policy."""
        n = max(self.tokens, 1)
        return {
            "tokens": float(self.tokens),
            "loss": self.loss / n,
            "mismatch_kl": self.k3 / n,
            "mismatch_k1": self.k1 / n,
            "logprob_gap_max": self.logprob_gap_max,
            "ratio_mean": self.ratio / n,
            "ratio_max": self.ratio_max,
            "ess": self.ratio**2 / (n * self.ratio_squared) if self.ratio_squared else 0.0,
            "clip_fraction": self.clipped / n,
            "entropy": self.entropy / n,
            "kl_reference": self.kl_reference / n,
        }


def policy_loss(
    logits: torch.Tensor, tokens: Tokens, settings: LossSettings
) -> tuple[torch.Tensor, Diagnostics]:
    """The summed loss of T tokens whose predictions are `logits`, float[T, vocabulary], and its diagnostics.

    Divide by the trainable tokens of the whole global batch before the gradient.
    """
    if tokens.likelihood is not None:
        said = tokens.likelihood > 0
        total, diagnostics = policy_loss(logits[~said], tokens.only(~said), settings)
        told = (
            torch.log_softmax(logits[said].float(), dim=-1)
            .gather(1, tokens.ids[said].unsqueeze(1))
            .squeeze(1)
        )
        return total - (told * tokens.likelihood[said]).sum(), diagnostics
    distribution = torch.log_softmax(logits.float() / tokens.temperatures.unsqueeze(1), dim=-1)
    logprobs = distribution.gather(1, tokens.ids.unsqueeze(1)).squeeze(1)
    gap = logprobs - tokens.logprobs
    log_ratio = gap.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    surrogate, clipped = _surrogate(ratio, logprobs.detach().exp(), tokens, settings)
    reference = tokens.logprobs if tokens.ref_logprobs is None else tokens.ref_logprobs
    drift = (reference - logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    kl = drift.exp() - drift - 1
    loss = -surrogate
    if settings.kl:
        loss = loss + settings.kl * kl
    total = (loss * tokens.weights).sum()
    with torch.no_grad():
        return total, Diagnostics(
            tokens=len(gap),
            loss=total.item(),
            k1=-gap.sum().item(),
            k3=(ratio - 1 - log_ratio).sum().item(),
            ratio=ratio.sum().item(),
            ratio_squared=ratio.square().sum().item(),
            ratio_max=ratio.max().item(),
            clipped=clipped.sum().item(),
            entropy=-(distribution.exp() * distribution).sum().item(),
            kl_reference=kl.sum().item(),
            logprob_gap_max=gap.abs().max().item(),
        )


def _surrogate(
    ratio: torch.Tensor, probability: torch.Tensor, tokens: Tokens, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token adds to the objective, and whether it has left the trust region (no gradient)."""
    advantages = tokens.advantages
    if settings.kind == "ppo":
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = torch.minimum(ratio * advantages, bounded * advantages)
        return surrogate, surrogate.detach() < (ratio * advantages).detach()
    moved = probability - tokens.logprobs.exp()
    left = torch.where(
        advantages > 0, moved > settings.clip_high, (advantages < 0) & (moved < -settings.clip_low)
    )
    return torch.where(left, ratio.detach(), ratio) * advantages, left
