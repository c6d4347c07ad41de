from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import TrainerError

from .packed import Packed, Sampled, pack, random_sequences

torch = pytest.importorskip("torch")
from paceline.trainer import LossSettings, OptimizerSettings, Trainer  # noqa: E402

pytestmark = pytest.mark.torch

LOSSES = [
    LossSettings("ppo"),
    LossSettings("dppo"),
    LossSettings("ppo", clip_low=0.1, clip_high=0.3, kl=0.2),
    LossSettings("dppo", clip_low=0.01, clip_high=0.01, kl=0.1),
]


def trainer(model_dir: Path, loss: LossSettings, lr: float = 0.0) -> Trainer:
    return Trainer(model_dir, OptimizerSettings(lr=lr, loss=loss, grad_clip=1e9))


def gradients(of: Trainer) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in of.model.parameters()]


def current_logprobs(of: Trainer, sequence: Sampled) -> torch.Tensor:
    """By the book: one sequence, no padding, all logits. Entry 0 is not defined."""
    logits = of.model(input_ids=torch.tensor(sequence.ids[None].astype(np.int64))).logits[0]
    rows = torch.log_softmax(logits / sequence.temperature, dim=-1)
    targets = torch.tensor(sequence.ids[1:].astype(np.int64))
    return torch.cat([torch.zeros(1), rows[:-1].gather(1, targets[:, None])[:, 0]])


def naive_loss(of: Trainer, sequences: list[Sampled], loss: LossSettings) -> torch.Tensor:
    """Token by token, straight from the definition."""
    total, tokens = torch.zeros(()), 0
    for sequence in sequences:
        now = current_logprobs(of, sequence)
        for t in range(sequence.prompt, len(sequence.ids)):
            old, advantage = float(sequence.logprobs[t]), sequence.advantage
            ratio = torch.exp(now[t] - old)
            if loss.kind == "ppo":
                bounded = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
                gain = torch.min(ratio * advantage, bounded * advantage)
            else:
                moved = now[t].exp().item() - np.exp(old)
                left = moved > loss.clip_high if advantage > 0 else moved < -loss.clip_low
                gain = (ratio.detach() if left else ratio) * advantage
            drift = old - now[t]
            total = total - gain + loss.kl * (drift.exp() - drift - 1)
            tokens += 1
    return total / tokens


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_definition_sequence_by_sequence(
    model_dir: Path, loss: LossSettings, seed: int
) -> None:
    sequences = random_sequences(seed)
    one, other = trainer(model_dir, loss), trainer(model_dir, loss)
    metrics = one.step([pack(sequences)])
    expected = naive_loss(other, sequences, loss)
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    for mine, reference in zip(gradients(one), gradients(other), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_packing_changes_neither_loss_nor_gradient(model_dir: Path, loss: LossSettings) -> None:
    sequences = random_sequences(5, count=9)
    packings = [
        [pack(sequences)],
        [pack([s]) for s in sequences],
        [pack(sequences[::-1][:4]), pack(sequences[::-1][4:])],
    ]
    results = []
    for packing in packings:
        of = trainer(model_dir, loss)
        results.append((of.step(packing), gradients(of)))
    first_metrics, first_gradients = results[0]
    for metrics, grads in results[1:]:
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-5)
        for mine, reference in zip(grads, first_gradients, strict=True):
            # Sums in another order: some processors' kernels differ by 7e-4 in the worst element.
            torch.testing.assert_close(mine, reference, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_its_own_samples_the_ratio_is_one_and_nothing_is_clipped(
    model_dir: Path, loss: LossSettings
) -> None:
    of = trainer(model_dir, loss)
    with torch.no_grad():
        sequences = [replace(s, logprobs=current_logprobs(of, s).numpy()) for s in random_sequences(2)]
    metrics = of.step([pack(sequences)])
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["mismatch_k1"] == pytest.approx(0, abs=1e-5)
    assert metrics["clip_fraction"] == 0


def test_a_loss_weight_of_two_counts_a_token_twice_and_zero_not_at_all(model_dir: Path) -> None:
    sequences = random_sequences(4, count=3)
    lengths = [len(s.ids) for s in sequences]
    tokens = sum(len(s.ids) - s.prompt for s in sequences)
    weighted, plain = trainer(model_dir, LOSSES[0]), trainer(model_dir, LOSSES[0])
    weights = np.repeat(np.array([2, 0, 1], np.float32), lengths)
    loss = weighted.step([pack(sequences, loss_weights=weights)])["loss"]
    doubled = [sequences[0], sequences[0], sequences[2]]
    expected = plain.step([pack(doubled)])["loss"] * sum(len(s.ids) - s.prompt for s in doubled) / tokens
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_kl_term_pulls_toward_reference_logprobs_where_they_come(model_dir: Path) -> None:
    sequences = random_sequences(6, count=2)
    of = trainer(model_dir, LossSettings("ppo", kl=1.0))
    with torch.no_grad():
        now = np.concatenate([current_logprobs(of, s).numpy() for s in sequences])
    shifted = of.step([pack(sequences, ref_logprobs=now + np.float32(np.log(2)))])
    assert shifted["kl_reference"] == pytest.approx(2 - np.log(2) - 1, rel=1e-3)


def test_unknown_streams_are_ignored(model_dir: Path) -> None:
    sequences = random_sequences(1)
    routed = np.zeros(sum(len(s.ids) for s in sequences), np.uint8)
    assert trainer(model_dir, LOSSES[0]).step([pack(sequences, routed_experts=routed)]) == trainer(
        model_dir, LOSSES[0]
    ).step([pack(sequences)])


def test_a_step_raises_the_odds_of_what_had_an_advantage(model_dir: Path) -> None:
    of = trainer(model_dir, LOSSES[1], lr=1e-3)
    good, bad = random_sequences(8, count=2)
    with torch.no_grad():
        before = [current_logprobs(of, s)[s.prompt :].sum().item() for s in (good, bad)]
        sampled = [
            replace(s, logprobs=current_logprobs(of, s).numpy(), advantage=a)
            for s, a in ((good, 1.0), (bad, -1.0))
        ]
    of.step([pack(sampled)])
    with torch.no_grad():
        after = [current_logprobs(of, s)[s.prompt :].sum().item() for s in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert of.version == 1


def test_the_learning_rate_rises_over_the_warm_up(model_dir: Path) -> None:
    of = Trainer(model_dir, OptimizerSettings(lr=1e-4, warmup_steps=4))
    rates = [of.step([pack(random_sequences(0))])["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4])


def corrupt(packed: Packed, name: str, position: int, value: float) -> Packed:
    values = getattr(packed, name).copy()
    values[position] = value
    return replace(packed, **{name: values})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("logprobs", np.nan, "logprobs is not finite"),
        ("logprobs", -np.inf, "logprobs is not finite"),
        ("logprobs", 0.5, "above 0"),
        ("advantages", np.inf, "advantages is not finite"),
        ("temperatures", 0.0, "temperature is not above 0"),
    ],
)
def test_a_bad_number_is_refused_by_its_position_and_nothing_changes(
    model_dir: Path, name: str, value: float, why: str
) -> None:
    of = trainer(model_dir, LOSSES[0], lr=1.0)
    before = [p.clone() for p in of.model.parameters()]
    good = pack(random_sequences(0))
    at = int(np.flatnonzero(good.trainable)[3])
    with pytest.raises(TrainerError, match=rf"micro-batch 1, token {at}: .*{why}"):
        of.step([good, corrupt(good, name, at, value)])
    assert all(torch.equal(a, b) for a, b in zip(before, of.model.parameters(), strict=True))
    assert of.version == 0


def test_what_does_not_train_may_hold_anything(model_dir: Path) -> None:
    good = pack(random_sequences(0))
    at = int(np.flatnonzero(~good.trainable)[1])
    assert trainer(model_dir, LOSSES[0]).step([corrupt(good, "logprobs", at, np.nan)]) == trainer(
        model_dir, LOSSES[0]
    ).step([good])


def test_a_trainable_first_token_and_an_untrainable_batch_are_refused(model_dir: Path) -> None:
    of, good = trainer(model_dir, LOSSES[0]), pack(random_sequences(0))
    with pytest.raises(TrainerError, match="first token"):
        of.step([corrupt(good, "trainable", 0, True)])
    with pytest.raises(TrainerError, match="no trainable token"):
        of.step([replace(good, trainable=np.zeros_like(good.trainable))])
    with pytest.raises(TrainerError, match="advantages has"):
        of.step([replace(good, advantages=good.advantages[1:])])


def test_padding_and_an_empty_micro_batch_change_nothing(model_dir: Path) -> None:
    plain = pack(random_sequences(0))
    extra = np.zeros(5)
    padded = Packed(
        token_ids=np.append(plain.token_ids, extra).astype(np.int32),
        trainable=np.append(plain.trainable, extra).astype(bool),
        logprobs=np.append(plain.logprobs, extra).astype(np.float32),
        advantages=np.append(plain.advantages, extra).astype(np.float32),
        temperatures=np.append(plain.temperatures, extra).astype(np.float32),
        lengths=np.append(plain.lengths, 5).astype(np.int32),
    )
    empty = Packed(*(getattr(plain, name)[:0] for name in Packed.__dataclass_fields__ if name != "streams"))
    of, other = trainer(model_dir, LOSSES[0]), trainer(model_dir, LOSSES[0])
    assert of.step([padded, empty]) == other.step([plain])
