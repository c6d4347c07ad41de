"""Advantages turn by turn: each token is credited with what was earned from its turn on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules, process_group
from paceline.core.samples import build_samples, turns_of_tokens
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.task import TaskRef
from paceline.errors import ConfigError

TASK = TaskRef("env", "train", 0)


def turn(prompt: int, sampled: int, *, extends: bool = True) -> Turn:
    ids, logprobs = np.full(sampled, 7, np.int32), np.full(sampled, -0.5, np.float32)
    return Turn(np.ones(prompt, np.int32), ids, logprobs, ((0, sampled),), extends, "stop")


def rollout(
    member: int, *rewards: float, breaks_at: int | None = None, role: str = "", reward: float | None = None
) -> Rollout:
    turns = tuple(turn(2, 2, extends=0 < n != breaks_at) for n in range(len(rewards)))
    return Rollout(
        id=RolloutId(0, member),
        task=TASK,
        outcome=COMPLETED,
        turns=turns,
        reward=sum(rewards) if reward is None else reward,
        turn_rewards=rewards if reward is None else None,
        role=role,
    )


def advantages(*rollouts: Rollout, discount: float = 1.0, seq_len: int = 100) -> list[list[float]]:
    group = ClosedGroup(0, TASK, len(rollouts), rollouts)
    algorithm = builtin("turn_grpo", {"discount": discount})
    result = process_group(group, GroupRules(env="env", seq_len=seq_len), algorithm)
    found = []
    for verdict in result.verdicts:
        mine: list[float] = []
        for sample in verdict.samples:
            values = np.broadcast_to(sample.advantage, sample.tokens)
            mine += values[sample.trainable].tolist()
        found.append(mine)
    return found


def test_a_turn_is_worth_what_was_earned_from_it_on_less_what_others_made_of_it() -> None:
    first, second = advantages(rollout(0, 1.0, 0.0), rollout(1, 0.0, 1.0))
    assert first == [0.0, 0.0, -0.5, -0.5]
    assert second == [0.0, 0.0, 0.5, 0.5]


def test_later_rewards_are_discounted_and_turns_that_only_one_has_are_compared_with_nobody() -> None:
    first, second = advantages(rollout(0, 1.0, 1.0, 5.0), rollout(1, 0.0, 1.0), discount=0.5)
    worth = (1 + 0.5 * (1 + 0.5 * 5), 1 + 0.5 * 5, 5.0), (0.5, 1.0)
    means = (worth[0][0] + worth[1][0]) / 2, (worth[0][1] + worth[1][1]) / 2
    assert first == pytest.approx([worth[0][0] - means[0]] * 2 + [worth[0][1] - means[1]] * 2 + [0.0] * 2)
    assert second == pytest.approx([worth[1][0] - means[0]] * 2 + [worth[1][1] - means[1]] * 2)


def test_without_turn_rewards_it_is_grpo() -> None:
    assert advantages(rollout(0, 0, 0, reward=1.0), rollout(1, 0, 0, reward=0.0)) == [[0.5] * 4, [-0.5] * 4]


def test_a_broken_prefix_and_a_cut_keep_tokens_with_their_turns() -> None:
    broken = rollout(0, 1.0, 2.0, 3.0, breaks_at=1)
    for seq_len in (100, 7):
        built = build_samples(broken, seq_len=seq_len, overlong="cut")
        turns = turns_of_tokens(broken, built.samples)
        assert [t[t >= 0].tolist() for t in turns] == [[0, 0], [1, 1, 2, 2] if seq_len == 100 else [1, 1, 2]]
        assert [len(t) for t in turns] == [sample.tokens for sample in built.samples]


def test_s35_two_agents_have_two_baselines() -> None:
    played = [
        rollout(0, 0, reward=1.0, role="solver"),
        rollout(1, 0, reward=10.0, role="critic"),
        rollout(2, 0, reward=0.0, role="solver"),
        rollout(3, 0, reward=8.0, role="critic"),
    ]
    assert advantages(*played) == [[0.5] * 2, [1.0] * 2, [-0.5] * 2, [-1.0] * 2]


def test_a_discount_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        builtin("turn_grpo", {"discount": 2})


def test_a_fork_trains_its_own_turn_and_carries_the_others_as_context() -> None:
    turns = (turn(2, 2, extends=False), turn(2, 2), msgspec.structs.replace(turn(2, 2), after=0))
    forked = msgspec.structs.replace(rollout(0, 1.0, 2.0, 3.0), turns=turns)
    built = build_samples(forked, seq_len=100, overlong="cut")
    found = turns_of_tokens(forked, built.samples)
    assert [t.tolist() for t in found] == [[-1, -1, 0, 0, -1, -1, 1, 1], [-1, -1, -1, -1, -1, -1, 2, 2]]
