"""The clipped losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from paceline.trainer.batch import Tokens  # noqa: E402
from paceline.trainer.loss import LossSettings, policy_loss  # noqa: E402

pytestmark = pytest.mark.torch


def one_token(now: float, sampled: float, advantage: float, settings: LossSettings):
    """Loss, gradient by the chosen logit, and diagnostics, of a token that had probability `sampled`."""
    logits = torch.tensor([[math.log(now), math.log(1 - now)]], requires_grad=True)
    tokens = Tokens(
        ids=torch.tensor([0]),
        logprobs=torch.tensor([math.log(sampled)]),
        advantages=torch.tensor([advantage]),
        temperatures=torch.ones(1),
        weights=torch.ones(1),
        ref_logprobs=None,
    )
    loss, diagnostics = policy_loss(logits, tokens, settings)
    loss.backward()
    return loss.item(), logits.grad[0, 0].item(), diagnostics.means()


# The gradient of the chosen logit is ratio x advantage x (1 - probability), negated, unless clipped.
@pytest.mark.parametrize(
    ("now", "sampled", "advantage", "loss", "gradient", "clipped"),
    [
        (0.50, 0.50, 1.0, -1.0, -0.50, 0),
        (0.60, 0.50, 1.0, -1.2, -0.48, 0),  # at the bound is inside
        (0.75, 0.50, 1.0, -1.2, 0.0, 1),  # ratio 1.5, bounded to 1.2
        (0.75, 0.50, -1.0, 1.5, 0.375, 0),  # rose where it should fall: not bounded
        (0.25, 0.50, -1.0, 0.8, 0.0, 1),  # ratio 0.5, bounded to 0.8
        (0.25, 0.50, 1.0, -0.5, -0.375, 0),
    ],
)
def test_ppo_by_hand(now, sampled, advantage, loss, gradient, clipped) -> None:
    result = one_token(now, sampled, advantage, LossSettings("ppo", clip_low=0.2, clip_high=0.2 + 1e-6))
    assert result[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert result[2]["clip_fraction"] == clipped


@pytest.mark.parametrize(
    ("now", "sampled", "advantage", "loss", "gradient", "clipped"),
    [
        (0.05, 0.01, 1.0, -5.0, -4.75, 0),  # ratio 5, yet the probability moved by 0.04 only
        (0.75, 0.50, 1.0, -1.5, 0.0, 1),  # moved up by 0.25
        (0.75, 0.50, -1.0, 1.5, 0.375, 0),
        (0.60, 0.90, -1.0, 2 / 3, 0.0, 1),  # moved down by 0.3
        (0.60, 0.90, 1.0, -2 / 3, -0.8 / 3, 0),
        (0.90, 0.50, 0.0, 0.0, 0.0, 0),
    ],
)
def test_dppo_by_hand(now, sampled, advantage, loss, gradient, clipped) -> None:
    result = one_token(now, sampled, advantage, LossSettings("dppo", clip_low=0.2, clip_high=0.2))
    assert result[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert result[2]["clip_fraction"] == clipped


def test_diagnostics_by_hand() -> None:
    means = one_token(0.75, 0.50, 1.0, LossSettings("ppo"))[2]
    assert means["ratio_mean"] == pytest.approx(1.5)
    assert means["mismatch_k1"] == pytest.approx(-math.log(1.5), rel=1e-5)
    assert means["mismatch_kl"] == pytest.approx(0.5 - math.log(1.5), rel=1e-4)
    assert means["entropy"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-5)
    assert means["ess"] == pytest.approx(1.0)


def test_temperature_divides_the_logits() -> None:
    tokens = Tokens(
        ids=torch.tensor([0]), logprobs=torch.tensor([-1.0]), advantages=torch.ones(1),
        temperatures=torch.tensor([2.0]), weights=torch.ones(1), ref_logprobs=None,
    )  # fmt: skip
    logits = torch.tensor([[4.0, 0.0, 2.0]])
    expected = 2.0 - math.log(math.exp(2) + 1 + math.exp(1))
    loss, _ = policy_loss(logits, tokens, LossSettings("dppo", clip_high=1.0))
    assert loss.item() == pytest.approx(-math.exp(expected + 1.0), rel=1e-5)


def test_an_absurd_ratio_stays_finite_and_shows() -> None:
    loss, gradient, means = one_token(0.5, 1e-30, -1.0, LossSettings("ppo"))
    assert math.isfinite(loss)
    assert math.isfinite(gradient)
    assert means["ratio_max"] > 1e8
