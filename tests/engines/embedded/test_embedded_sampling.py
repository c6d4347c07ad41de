from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch

from paceline.engines.embedded.sampling import SamplingParams, sample, uniforms

pytestmark = pytest.mark.torch


def draws(logits: torch.Tensor, count: int, **params: float) -> tuple[list[int], list[float]]:
    noise = uniforms([3] * count, range(count))
    return sample(logits.expand(count, -1), [SamplingParams(**params)] * count, noise)


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    whole = uniforms([1, 2, 2**64 - 1], [5, 5, 10**6])
    assert whole[2] == uniforms([2**64 - 1], [10**6])[0]
    assert len(set(whole)) == 3


def test_noise_is_uniform_over_positions_and_over_seeds_and_never_one() -> None:
    for noise in (uniforms([0] * 4096, range(4096)), uniforms(range(4096), [0] * 4096)):
        counts = np.histogram(noise, bins=16, range=(0, 1))[0]
        assert ((counts - 256) ** 2 / 256).sum() < 45  # chi-squared, 15 degrees of freedom: p < 1e-4 above it
        assert noise.max() < 1


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    ids, logprobs = draws(probs.log().unsqueeze(0), 8000)
    frequency = np.bincount(ids, minlength=5) / 8000
    np.testing.assert_allclose(frequency, probs.numpy(), atol=0.02)
    assert frequency[4] == 0
    np.testing.assert_allclose(np.exp(logprobs), probs.numpy()[ids], rtol=1e-5)


def test_the_logprob_is_that_after_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    ids, logprobs = draws(logits, 4, temperature=0.5)
    np.testing.assert_allclose(logprobs, (logits / 0.5).log_softmax(-1)[0][ids].numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.45}, [0]),
        ({"top_p": 0.79}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"top_k": -1}, [0, 1, 2, 3]),
    ],
)
def test_cut_tokens_are_never_drawn_and_the_logprob_is_renormalised_over_the_rest(
    params: dict[str, float], kept: list[int]
) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    ids, logprobs = draws(probs.log().unsqueeze(0), 600, **params)
    assert sorted(set(ids)) == kept
    np.testing.assert_allclose(np.exp(logprobs), (probs / probs[kept].sum()).numpy()[ids], rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_of_logits_that_are_not_finite_a_token_is_drawn_that_is_one_with_a_logprob_that_is_none(
    bad: float,
) -> None:
    """Weights may overflow in training: the reply is refused with its place, and the engine goes on."""
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    ids, logprobs = sample(logits, [SamplingParams()] * 3, uniforms([1, 2, 3], [0, 0, 0]))
    assert all(0 <= token < 10 for token in ids)
    assert np.isfinite(logprobs).tolist() == [True, False, True]


def test_greedy_takes_the_best_token_beside_rows_that_sample_and_reports_the_plain_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    params = [SamplingParams(temperature=0, top_k=1), SamplingParams(temperature=2.0, top_k=2)]
    ids, logprobs = sample(logits, params, uniforms([1, 1], [0, 1]))
    assert ids[0] == 1
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[1]), rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("logprobs", 5),
        ("n", 2),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("stop", ""),
        ("nonsense", 1),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, SamplingParams)
