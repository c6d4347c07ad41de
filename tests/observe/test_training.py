"""Rows of metrics: what is counted, over what, and under which key."""

from __future__ import annotations

import math

import pytest

from observe.told import FAILED, Told
from observe.worlds import EnvShape, Shape, World, sample
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.rollout import Outcome
from paceline.observe.metrics import METRICS, metric_of
from paceline.observe.run import RunFolds


def test_s13_drawn_share_and_trained_share_are_told_apart() -> None:
    told = Told()
    ships = []
    for group in range(20):
        env = "A" if group < 10 else "B"
        members = told.start(group, 2, env=env)
        for member in members:
            told.end(member)
        if env == "A" and group < 8:
            told.process(
                [told.verdict(m, "zero_signal", advantage=0.0) for m in members],
                variance=0.0,
                dead="zero_signal",
            )
        else:
            told.process([told.verdict(m) for m in members])
            ships += members
    row = told.ship(1, ships)
    assert row.values["train/A/drawn_share"] == 0.5
    assert row.values["train/A/shipped_share"] == pytest.approx(4 / 24)
    assert row.values["train/B/shipped_share"] == pytest.approx(20 / 24)
    assert row.values["train/A/groups_zero_signal"] == 0.8


def test_s42_a_detection_rate_is_over_the_rollouts_of_its_own_environment() -> None:
    told = Told()
    a, b = told.start(0, 4, env="A"), told.start(1, 6, env="B")
    for rollout in (*a, *b):
        told.end(rollout)
    told.process([told.verdict(r, flags=("repetition",) if r in a[:2] else ()) for r in a])
    told.process([told.verdict(r) for r in b])
    values = told.ship(1, [*a, *b]).values
    assert values["train/all/flagged/repetition"] == 0.2
    assert values["train/A/flagged/repetition"] == 0.5
    assert values["train/B/flagged/repetition"] == 0.0


def test_s46_a_window_goes_on_until_a_batch_ships() -> None:
    told = Told()
    dropped, good = told.start(0, 2), told.start(1, 2)
    for rollout in (*dropped, *good):
        told.end(rollout)
    told.process([told.verdict(r, "filtered") for r in dropped])
    told.tell(on.TimerFired())  # a cut that finds nothing: no batch, and the window stays open
    told.process([told.verdict(r) for r in good])
    values = told.ship(1, good).values
    assert values["train/all/rollouts"] == 4
    assert values["train/all/filtered"] == 0.5


def test_s72_the_trainable_rate_is_over_what_shipped_and_error_rates_are_over_the_window() -> None:
    told = Told()
    rollouts = told.start(0, 10)
    for rollout in rollouts[:6]:
        told.end(rollout, 0, reward=None, outcome=FAILED)
    for rollout in rollouts[6:]:
        told.end(rollout)
    later = told.start(1, 2)
    for rollout in later:
        told.end(rollout)
    shipped = rollouts[7:]
    told.process(
        [
            *(told.verdict(r, "failed", advantage=None) for r in rollouts[:6]),
            told.verdict(rollouts[6], "filtered"),
            *(told.verdict(r, advantage=a) for r, a in zip(shipped, (0.5, -0.5, 0.0), strict=True)),
        ]
    )
    values = told.ship(1, shipped).values
    assert values["train/all/trainable"] == pytest.approx(2 / 3)
    assert values["train/all/failed"] == 0.6
    assert values["train/all/filtered"] == 0.1
    # A batch of nothing but rollouts that an earlier window finalised.
    told.process([told.verdict(r) for r in later])
    told.ship(2, later[:1])
    values = told.ship(3, later[1:]).values
    assert values["train/all/trainable"] == 1.0
    assert values["train/all/rollouts"] == 0
    assert "train/all/failed" not in values
    assert "train/all/reward" not in values
    assert values["train/all/reward_shipped"] == 1.0


def test_s73_the_means_of_a_rewards_parts_add_up_to_its_mean_in_each_subset() -> None:
    told = Told()
    rollouts = told.start(0, 4)
    for rollout, (a, b) in zip(rollouts, ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)), strict=False):
        told.end(rollout, reward=a + b, rewards={"a": a, "b": b})
    told.end(rollouts[3], 0, reward=None, outcome=FAILED)
    told.process(
        [told.verdict(r) for r in rollouts[:3]] + [told.verdict(rollouts[3], "failed", advantage=None)]
    )
    values = told.ship(1, rollouts[:3]).values
    scored = [values[f"train/all/{name}"] for name in ("rewards/a", "rewards/b", "reward")]
    every = [values[f"train/all/{name}"] for name in ("rewards_all/a", "rewards_all/b", "reward_all")]
    assert scored == pytest.approx([2 / 3, 2 / 3, 4 / 3])
    assert every == pytest.approx([0.5, 0.5, 1.0])


def test_s74_late_evals_and_repeated_steps_keep_rows_of_their_own() -> None:
    told = Told()
    report = do.ReportEval("held-out", 3, 3, 4, 4, 0.5)

    def step(number: int) -> None:
        (one,) = told.start(1000 + len(told.rows))
        told.end(one)
        told.process([told.verdict(one)])
        told.ship(number, [one])

    step(5)
    told.tell(on.TimerFired(), report)
    step(6)
    told.tell(on.TimerFired(), report)
    told.tell(on.RunOpened("told", 7, resumed_from=4))
    step(5)
    assert [row.key for row in told.rows] == [
        ("step", 0, "", 5),
        ("eval", 0, "held-out", 3),
        ("step", 0, "", 6),
        ("eval", 0, "held-out", 3),
        ("step", 1, "", 5),
    ]
    assert len(told.folds.training.steps) == 3
    assert len(told.folds.training.evals) == 2


def test_s75_lengths_before_and_after_cutting_are_not_mixed() -> None:
    told = Told()
    long, short = told.start(0, 2)
    told.end(long, 12)
    told.end(short, 5)
    told.process([told.verdict(long, cut=4), told.verdict(short)])
    made = [sample(told.rollouts[long], cut=4), sample(told.rollouts[short])]
    values = told.ship(1, [long, short], made).values
    assert values["train/all/sample_generated"] == 8.5
    assert values["train/all/sample_trained"] == 6.5
    assert values["train/all/sample_cut"] == 0.5


def test_staleness_counts_from_the_oldest_token_of_each_rollout() -> None:
    told = Told()
    old, new = told.start(0, 2)
    told.end(old, version=2)
    told.end(new, version=4)
    told.process([told.verdict(old), told.verdict(new)])
    values = told.ship(5, [old, new]).values
    assert (values["staleness/mean"], values["staleness/max"]) == (1.0, 2.0)


def test_a_turn_that_took_several_requests_is_one_turn() -> None:
    told = Told()
    (rollout,) = told.start(0)
    for tokens in (4, 0, 6):  # parked, aborted before it began, finished
        told.call(rollout, tokens)
    told.end(rollout, 10)
    told.process([told.verdict(rollout)])
    assert told.ship(1, [rollout]).values["train/a/turns"] == 1


def test_time_in_model_gate_and_environment_adds_up_to_the_rollout() -> None:
    told = Told()
    (one,) = told.start(0)
    told.end(one)
    told.process([told.verdict(one)])
    values = told.ship(1, [one]).values
    assert [values[f"train/a/{name}"] for name in ("model_s", "gate_s", "env_s")] == [2.5, 0.5, 1.0]


def test_a_step_that_is_never_acknowledged_has_its_row_when_the_run_ends() -> None:
    told = Told()
    (one,) = told.start(0)
    told.end(one)
    told.process([told.verdict(one)])
    told.ship(1, [one])
    assert told.rows[-1].values["time/train_s"] == 1.0
    told.tell(on.TimerFired(), do.ShipBatch(do.Batch(2, (), ())))
    assert len(told.rows) == 1
    told.finish("failed")
    assert told.rows[-1].key == ("step", 0, "", 2)


def test_truncation_and_cancellation_are_shares_by_environment() -> None:
    told = Told()
    a, b = told.start(0, 2, env="A"), told.start(1, 2, env="B")
    told.end(a[0], outcome=Outcome("truncated", "tokens"))
    told.end(a[1])
    told.end(b[0], reward=None, outcome=Outcome("cancelled", "stale"))
    told.end(b[1])
    told.process([told.verdict(r) for r in a])
    told.process([told.verdict(b[0], "stale", advantage=None), told.verdict(b[1])])
    values = told.ship(1, [*a, b[1]]).values
    assert (values["train/A/truncated"], values["train/B/truncated"], values["train/all/truncated"]) == (
        0.5,
        0.0,
        0.25,
    )
    assert (values["train/A/cancelled"], values["train/B/cancelled"]) == (0.0, 0.5)


def test_length_bias_compares_trained_with_drawn() -> None:
    told = Told()
    short, long = told.start(0, 2)
    told.end(short, 10)
    told.end(long, 90)
    told.process([told.verdict(short), told.verdict(long, "filtered")])
    told.ship(1, [short])
    (bias,) = told.folds.lengths.bias()
    assert (bias.drawn_mean, bias.trained_mean, bias.ratio) == (50.0, 10.0, 0.2)
    assert [(b.upto, b.drawn, b.trained) for b in bias.buckets] == [(16, 1, 1), (128, 1, 0)]
    assert bias.buckets[1].by_fate == {"filtered": 1}


def test_every_metric_that_a_run_writes_is_documented() -> None:
    envs = (EnvShape("a/b"), EnvShape("guess", turns=(1, 3), wait_s=0.2))
    folds = RunFolds()
    folds.read(World(Shape(envs=envs, evals=envs, steps=3)).decisions)
    names = {name for row in (*folds.training.steps, *folds.training.evals) for name in row.values}
    assert {name for name in names if metric_of(name) is None} == set()
    assert "train/a/b/reward" in names
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_rows_hold_finite_numbers_and_shares_lie_between_zero_and_one() -> None:
    folds = RunFolds()
    folds.read(World(Shape(steps=6, seed=3)).decisions)
    for row in folds.training.steps:
        assert all(math.isfinite(value) for value in row.values.values())
        for name, value in row.values.items():
            metric = metric_of(name)
            assert metric is not None
            if metric.unit == "share":
                assert 0.0 <= value <= 1.0, name


def test_a_live_run_keeps_a_bounded_number_of_rows_and_nothing_that_has_settled() -> None:
    world = World(Shape(steps=6))
    folds = RunFolds(live=True)
    folds.read(world.decisions)
    assert folds.training.steps.maxlen is not None
    assert folds.lives.unsettled == {}
    assert folds.lives.queue == {}
    assert folds.spans.lanes() == []
