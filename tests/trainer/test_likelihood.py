"""Tokens that were not sampled are learnt by their likelihood, with the weight they come with."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from paceline.errors import TrainerError  # noqa: E402
from paceline.trainer.batch import blocks, check  # noqa: E402
from paceline.trainer.loss import LossSettings, policy_loss  # noqa: E402

from .packed import VOCABULARY, pack, random_sequences  # noqa: E402


def loss_of(packed: object, table: torch.Tensor) -> torch.Tensor:
    """The loss of a model whose logits depend on the token before alone."""
    total = torch.zeros(())
    for block in blocks(packed):  # type: ignore[arg-type]
        logits = table[block.token_ids][block.predicts]
        total = total + policy_loss(logits, block.tokens, LossSettings())[0]
    return total


def test_the_loss_grows_by_the_weighted_likelihood_and_the_policy_part_stays() -> None:
    sequences = random_sequences(3)
    plain = pack(sequences)
    rng = np.random.default_rng(1)
    weights = np.where(plain.trainable, 0, rng.uniform(0, 1, len(plain.trainable))).astype(np.float32)
    starts = np.cumsum(plain.lengths) - plain.lengths
    weights[starts] = 0
    table = torch.from_numpy(rng.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32))
    ids = torch.from_numpy(plain.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(table, dim=-1)[ids[:-1], ids[1:]]
    expected = -(logprobs * torch.from_numpy(weights[1:])).sum()
    with_weights = pack(sequences, likelihood_weights=weights)
    assert check([with_weights]) == int(plain.trainable.sum())
    torch.testing.assert_close(loss_of(with_weights, table), loss_of(plain, table) + expected)


@pytest.mark.parametrize(
    ("at", "weight", "told"),
    [
        ("sampled", 0.5, "set on a sampled token"),
        ("first", 0.5, "nothing precedes"),
        ("prompt", -1.0, "is no weight"),
    ],
)
def test_a_weight_that_cannot_be_is_refused_with_its_place(at: str, weight: float, told: str) -> None:
    sequences = [s for s in random_sequences(3) if s.prompt > 1]
    packed = pack(sequences)
    weights = np.zeros(len(packed.trainable), np.float32)
    weights[{"sampled": int(np.argmax(packed.trainable)), "first": 0, "prompt": 1}[at]] = weight
    with pytest.raises(TrainerError, match=told):
        check([pack(sequences, likelihood_weights=weights)])
