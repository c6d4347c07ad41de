"""Rewards become advantages."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sink_records import TASK, rollout, sample

from paceline.core.advantages import BUILTIN, Advantages, Algorithm, GroupView, build, builtin
from paceline.errors import ConfigError

NAMES = sorted(BUILTIN)


def view(rewards: Any, votes: list[bool] | None = None, tokens: list[int] | None = None) -> GroupView:
    rewards = np.asarray(rewards, np.float64)
    n = len(rewards)
    lengths = tokens or [4] * n
    return GroupView(
        group=0,
        task=TASK,
        rewards=rewards,
        votes=np.array([True] * n if votes is None else votes, np.bool_),
        sampled_tokens=np.array(lengths, np.int64),
        turns=np.ones(n, np.int64),
        endings=("completed",) * n,
        rollouts=tuple(rollout(reward=float(r), member=i) for i, r in enumerate(rewards)),
        samples=tuple((sample(length, member=i),) for i, length in enumerate(lengths)),
    )


def values(name: str, rewards: Any, votes: list[bool] | None = None) -> NDArray[np.float64]:
    answer = builtin(name, {}).advantages(view(rewards, votes), ()).values
    assert isinstance(answer, np.ndarray)
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_s31_one_survivor_has_no_advantage_and_none_is_not_nan(name: str) -> None:
    assert values(name, [1.0]).tolist() == [0.0]
    assert values(name, []).tolist() == []


def test_s31_three_survivors_are_compared_with_each_other() -> None:
    assert values("grpo", [1, 0, 0]).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", NAMES)
def test_s32_advantages_are_bounded_and_do_not_move_with_a_shift(name: str) -> None:
    rewards = np.array([0.9, *[0.3] * 7], np.float32)
    found = values(name, rewards)
    assert np.abs(found).max() <= 10
    assert found == pytest.approx(values(name, rewards + np.float32(5)), abs=1e-3)


def test_s32_leave_one_out_gives_the_first_its_whole_difference() -> None:
    assert values("rloo", np.array([0.9, *[0.3] * 7], np.float32))[0] == pytest.approx(0.6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.1 + 0.2, 0.3, 0.3], [np.float32(0.3), 0.3]])
def test_s32_no_spread_is_exactly_zero(name: str, rewards: list[float]) -> None:
    assert values(name, rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", NAMES)
def test_s44_it_is_the_spread_that_counts_not_the_value(name: str) -> None:
    assert not values(name, [1.3] * 4).any()
    assert not values(name, [-0.4] * 4).any()
    assert values(name, [1.0, 1.3]).all()


def test_the_formulas() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    assert values("grpo", rewards).tolist() == [0, -1, -1, 2]
    assert values("dr_grpo", rewards).tolist() == [0, -1, -1, 2]
    assert values("rloo", rewards).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])
    assert values("grpo_std", rewards) == pytest.approx(np.array([0, -1, -1, 2]) / np.sqrt(1.5))


def test_one_that_does_not_vote_is_compared_with_those_that_do() -> None:
    votes = [True, True, False]
    assert values("grpo", [1, 0, 3], votes).tolist() == [0.5, -0.5, 2.5]
    assert values("rloo", [1, 0, 3], votes).tolist() == [1.0, -1.0, 2.5]
    assert values("grpo_std", [1, 0, 3], votes).tolist() == [1.0, -1.0, 5.0]
    # Nothing to divide by: the voters have no spread, and the difference stays as it is.
    assert values("grpo_std", [1, 1, 3], votes).tolist() == [0.0, 0.0, 2.0]
    assert values("grpo", [1, 0], [False, False]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "grpo_std"])
def test_per_response_weights_every_rollout_the_same_and_the_group_as_before(name: str) -> None:
    seen = view([1, 0, 0], tokens=[3, 5, 9])
    weights = builtin(name, {"per_response": True}).advantages(seen, ()).streams["loss_weights"]
    sums = [float(w[s.trainable].sum()) for (w,), (s,) in zip(weights, seen.samples, strict=True)]
    assert sums == pytest.approx([14 / 3] * 3)  # 2 + 4 + 8 trainable tokens


def test_an_unknown_algorithm_or_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo_std'"):
        builtin("grpo_sdt", {})
    with pytest.raises(ConfigError, match="did you mean 'per_response'"):
        builtin("grpo", {"per_respons": True})
    with pytest.raises(ConfigError, match="it takes: none"):
        builtin("rloo", {"beta": 1})
    with pytest.raises(ConfigError, match="true or false"):
        builtin("grpo", {"per_response": "yes"})


@settings(deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.floats(-100, 100, allow_nan=False), min_size=1, max_size=16),
    st.randoms(use_true_random=False),
)
def test_advantages_are_finite_sum_to_zero_and_follow_the_order_of_rewards(
    name: str, rewards: list[float], random: Any
) -> None:
    found = values(name, rewards)
    assert np.isfinite(found).all()
    assert abs(float(found.sum())) <= 1e-9 * max(1.0, float(np.abs(found).max())) * len(rewards)
    ranked = found[np.argsort(rewards, kind="stable")]
    assert (np.diff(ranked) >= -1e-9).all()
    order = list(range(len(rewards)))
    random.shuffle(order)
    assert values(name, [rewards[i] for i in order]) == pytest.approx(found[order], abs=1e-6)


class Bare(Algorithm):
    def advantages(self, view: GroupView, answers: Any) -> Advantages:
        raise NotImplementedError


class Needs(Bare):
    def __init__(self, scale: float) -> None:
        self.share = 1 / scale


@pytest.mark.parametrize(
    ("made", "args", "says"),
    [
        (Bare, {"scale": 1.0}, "algorithm 'x': no argument 'scale' (it takes: none)"),
        (Needs, {}, "algorithm 'x': args.scale is required"),
        (Needs, {"scale": 0.0}, "algorithm 'x' cannot be made with these args: ZeroDivisionError"),
    ],
)
def test_args_that_an_algorithm_of_ones_own_does_not_take_are_named(made: Any, args: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build("x", made, args)


def test_a_class_that_is_no_algorithm_is_refused_before_a_group_needs_it() -> None:
    class Half:
        def advantages(self, view: object, replies: object) -> None: ...

    with pytest.raises(ConfigError, match=r"'mine:Half' makes a Half, which has no requests: derive it from"):
        build("mine:Half", Half, {})  # type: ignore[arg-type]
