"""A closed group becomes verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import CANCELLED, FAILED, TRUNCATED, closed, rewarded, rollout, rules, turn

from paceline.config.batch import BatchSection
from paceline.config.environment import EnvSection
from paceline.config.filters import FiltersSection, LengthFilter
from paceline.core.advantages import Advantages, Algorithm, AlgorithmError, GroupView, ServiceRequest, builtin
from paceline.core.processing import GroupRules, broken_group, process_group, service_requests
from paceline.domain.group import ClosedGroup, GroupResult
from paceline.domain.rollout import COMPLETED, Outcome

GRPO = builtin("grpo", {})
SHORT = LengthFilter(type="length", min_tokens=2)


def process(group: ClosedGroup, **changes: Any) -> GroupResult:
    return process_group(group, rules(**changes), GRPO)


def fates(result: GroupResult) -> list[str]:
    return [verdict.fate for verdict in result.verdicts]


def advantages(result: GroupResult) -> list[float | None]:
    return [verdict.advantage for verdict in result.verdicts]


def test_s04_a_dead_group_says_which_death_it_died() -> None:
    assert process(rewarded(None, None)).dead == "failed"
    assert process(rewarded(1, None), all_or_nothing=True).dead == "void"
    assert process(rewarded(1, 0), pre=(SHORT,)).dead == "filtered"
    assert process(rewarded(1, 1)).dead == "zero_signal"
    assert process(closed(rollout(reward=None, outcome=CANCELLED))).dead == "cancelled"
    assert process(closed(size=2)).dead == "cancelled"
    assert process(rewarded(1, 0)).dead is None


def test_s20_a_rollout_of_two_samples_votes_once_and_both_carry_its_advantage() -> None:
    two = rollout(turn([1, 2], [3, 4]), turn([1, 2, 9], [5], extends=False), turn([6], [7]), reward=1.0)
    first, second = process(closed(two, rollout(reward=0.0))).verdicts
    assert [sample.advantage for sample in first.samples] == [0.5, 0.5]
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert first.prefix_breaks == 1


def test_s29_a_record_without_logprobs_fails_alone_and_names_its_environment() -> None:
    broken = rollout(msgspec.structs.replace(turn([1], [2]), logprobs=None))
    result = process(closed(rollout(reward=1.0), broken, rollout(reward=0.0)))
    assert fates(result) == ["queued", "failed", "queued"]
    assert "env 'env'" in result.verdicts[1].reason
    assert "logprobs" in result.verdicts[1].reason
    assert advantages(result) == [0.5, None, -0.5]


def test_s30_the_baseline_is_the_groups_own() -> None:
    assert advantages(process(rewarded(1, 0))) == [0.5, -0.5]
    assert fates(process(rewarded(0, 0))) == ["zero_signal", "zero_signal"]


def test_s31_survivors_three_one_and_none() -> None:
    three = process(rewarded(1, 0, 0, None))
    assert advantages(three) == pytest.approx([2 / 3, -1 / 3, -1 / 3, None])
    assert fates(three) == ["queued"] * 3 + ["failed"]
    one = process(rewarded(1, None, None, None))
    assert fates(one) == ["zero_signal", "failed", "failed", "failed"]
    assert (one.dead, one.reward_mean, one.reward_variance) == ("zero_signal", 1.0, 0.0)
    none = process(rewarded(None, None, None, None))
    assert (none.dead, none.reward_mean, none.reward_variance) == ("failed", None, None)
    assert len(three.verdicts + one.verdicts + none.verdicts) == 12


def test_s33_no_reward_is_not_a_reward_of_zero() -> None:
    unscored = rollout(reward=None)
    result = process(closed(rollout(reward=-1.0), rollout(reward=-0.5), unscored, rollout(reward=-0.5)))
    assert advantages(result) == pytest.approx([-1 / 3, 1 / 6, None, 1 / 6])
    assert fates(result) == ["queued", "queued", "failed", "queued"]
    assert "unscored" in result.verdicts[2].reason
    assert process(closed(rollout(reward=-1.0), unscored, unscored, unscored)).dead == "zero_signal"


def test_s34_a_metric_that_is_nan_moves_nothing_and_a_reward_that_is_nan_fails() -> None:
    logged = rollout(reward=0.7, rewards={"a": 0.7, "b": float("nan")}, metrics={"c": float("nan")})
    result = process(closed(logged, rollout(reward=0.1), rollout(reward=float("nan"))))
    assert advantages(result) == pytest.approx([0.3, -0.3, None])
    assert fates(result) == ["queued", "queued", "failed"]
    assert "nan" in result.verdicts[2].reason


def test_s35_named_parts_of_rewards_are_never_one_baseline() -> None:
    # A rollout has one reward. Roles that need a baseline each are refused, not averaged.
    first = rollout(reward=1.0, rewards={"solver": 1.0, "critic": 10.0})
    second = rollout(reward=0.0, rewards={"solver": 0.0, "critic": 8.0})
    assert advantages(process(closed(first, second))) == [0.5, -0.5]
    per_turn = rollout(reward=1.0, turn_rewards=(1.0, 2.0, 3.0))
    assert "turn_rewards" in process(closed(per_turn, second)).verdicts[0].reason


def test_who_is_only_played_against_needs_no_score_and_neither_votes_nor_trains() -> None:
    against = [rollout(role="critic", reward=reward, trains=False) for reward in (None, 10.0)]
    result = process(closed(rollout(role="solver", reward=1.0), *against, rollout(role="solver", reward=0.0)))
    assert fates(result) == ["queued", "filtered", "filtered", "queued"]
    assert advantages(result) == [0.5, None, None, -0.5]
    assert {verdict.reason for verdict in result.verdicts[1:3]} == {
        "role 'critic' is frozen: it is played against"
    }


def test_s37_a_truncated_rollout_keeps_its_real_reward() -> None:
    result = process(closed(rollout(reward=0.4, outcome=TRUNCATED), rollout(reward=0.0)))
    assert advantages(result) == [0.2, -0.2]
    assert result.verdicts[0].samples[0].reward == 0.4
    assert result.verdicts[0].samples[0].ending == "truncated"


def test_s38_a_cut_rollout_is_truncated_and_an_overlong_one_is_counted() -> None:
    long = rollout(turn([0], list(range(1, 12))), reward=1.0)
    cut = process(closed(long, rollout(reward=0.0)), seq_len=8)
    assert cut.verdicts[0].samples[0].ending == "truncated"
    assert fates(process(closed(long, rollout(reward=0.0)), seq_len=8, truncated_trains=False)) == [
        "truncated",
        "queued",
    ]
    dropped = process(closed(long, rollout(reward=0.0)), seq_len=8, overlong="drop")
    assert fates(dropped) == ["overlong", "queued"]
    assert advantages(dropped) == [0.5, -0.5]  # it was scored, so it votes


def test_s39_truncated_ones_that_do_not_train_still_vote() -> None:
    long = rollout(turn([1], [2]), turn([3], [4]), turn([5], [6]), reward=0.0, outcome=TRUNCATED)
    group = closed(rollout(reward=1.0), long)
    result = process(group, truncated_trains=False)
    assert fates(result) == ["queued", "truncated"]
    assert advantages(result) == [0.5, -0.5]
    assert result.verdicts[1].samples == ()
    assert long.sampled_tokens == 3  # lengths are those of the record


def test_s39_truncated_ones_can_be_left_out_of_the_baseline_and_train_against_it() -> None:
    group = closed(rollout(reward=1.0), rollout(reward=0.0), rollout(reward=0.0, outcome=TRUNCATED))
    result = process(group, truncated_votes=False)
    assert advantages(result) == [0.5, -0.5, -0.5]
    assert (result.reward_mean, result.reward_variance) == (0.5, 0.25)
    assert fates(process(group, truncated_votes=False, truncated_trains=False)) == [
        "queued",
        "queued",
        "truncated",
    ]


def test_a_truncated_rollout_that_nobody_scored_neither_votes_nor_trains() -> None:
    group = closed(rollout(reward=1.0), rollout(reward=0.0), rollout(reward=None, outcome=TRUNCATED))
    assert fates(process(group)) == ["queued", "queued", "truncated"]
    assert advantages(process(group)) == [0.5, -0.5, None]


def test_s41_the_threshold_drops_both_signs_and_back_fill_needs_no_cut() -> None:
    class Given(Algorithm):
        name = "given"

        def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
            return Advantages(np.array([0, 0.05, -0.05, 0.051, -0.2]))

    group = rewarded(0, 1, 2, 3, 4)
    result = process_group(group, rules(zero_advantage_threshold=0.05), Given())
    assert fates(result) == ["zero_signal"] * 3 + ["queued"] * 2
    assert fates(process_group(group, rules(), Given())) == ["zero_signal"] + ["queued"] * 4
    assert fates(process_group(group, rules(zero_advantage=False), Given())) == ["queued"] * 5


def test_s42_flags_are_on_the_verdict_whether_or_not_the_filter_enforces() -> None:
    long = rollout(turn([1], [2, 3]), reward=0.0)
    for enforce, fate in ((True, "filtered"), (False, "queued")):
        rule = SHORT.model_copy(update={"enforce": enforce})
        result = process(closed(rollout(reward=1.0), long), pre=(rule,))
        assert fates(result) == [fate, "queued"]
        assert [verdict.flags for verdict in result.verdicts] == [("length",), ()]


def test_a_filtered_rollout_has_voted_unless_told_otherwise() -> None:
    longer = turn([1], [2, 3])
    group = closed(rollout(reward=1.0), rollout(longer, reward=0.0), rollout(longer, reward=0.5))
    assert advantages(process(group, pre=(SHORT,))) == [0.5, -0.5, 0.0]
    assert advantages(process(group, pre=(SHORT,), filtered_vote=False)) == [None, -0.25, 0.25]


def test_s44_zero_signal_is_about_spread() -> None:
    assert process(rewarded(*[1.3] * 4)).dead == "zero_signal"
    assert process(rewarded(*[-0.4] * 4)).dead == "zero_signal"
    assert process(rewarded(1.0, 1.3)).dead is None


def test_all_or_nothing_voids_the_rest_when_one_has_no_score_or_was_never_launched() -> None:
    result = process(rewarded(1, None, 0), all_or_nothing=True)
    assert fates(result) == ["void", "failed", "void"]
    assert fates(process(closed(rollout(reward=1.0), size=2), all_or_nothing=True)) == ["void"]
    assert fates(process(rewarded(1, 0), all_or_nothing=True)) == ["queued", "queued"]
    refused = rollout(msgspec.structs.replace(turn([1], [2]), logprobs=None))
    assert fates(process(closed(rollout(reward=1.0), refused), all_or_nothing=True)) == ["void", "failed"]


def test_cancelled_members_shrink_the_group_and_the_rest_trains() -> None:
    result = process(
        closed(rollout(reward=1.0), rollout(reward=None, outcome=CANCELLED), rollout(reward=0.0))
    )
    assert fates(result) == ["queued", "cancelled", "queued"]
    assert advantages(result) == [0.5, None, -0.5]


class Teacher(Algorithm):
    """Asks for one number a sample and hands it out per token."""

    name = "teacher"

    def requests(self, view: GroupView) -> Sequence[ServiceRequest]:
        return [ServiceRequest("teacher", s.token_ids) for samples in view.samples for s in samples]

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        left = iter(replies)
        per = tuple(
            tuple(np.full(s.tokens, next(left), np.float32) for s in samples) for samples in view.samples
        )
        return Advantages(per, {"ref_logprobs": per})


def test_an_algorithm_that_asks_gets_its_answers_in_order() -> None:
    group = closed(
        rollout(turn([1], [2]), turn([1, 5], [6], extends=False), reward=1.0),
        rollout(reward=None, outcome=FAILED),
        rollout(reward=0.0),
    )
    asked = service_requests(group, rules(), Teacher())
    assert [request.payload.tolist() for request in asked] == [[1, 2], [1, 5, 6], [1, 2, 3]]
    result = process_group(group, rules(), Teacher(), (1.0, 4.0, -2.0))
    first, _, third = result.verdicts
    assert [sample.advantage.tolist() for sample in first.samples] == [[0, 1], [0, 0, 4]]  # type: ignore[union-attr]
    assert first.advantage == 2.5
    assert third.samples[0].streams["ref_logprobs"].tolist() == [-2, -2, -2]
    assert service_requests(group, rules(), GRPO) == ()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Advantages(np.zeros(3)), "3 members"),
        (Advantages(np.zeros((2, 1))), "shape"),
        (Advantages(np.array([0.0, np.nan])), "nan"),
        (Advantages(np.array([0.0, 1e39])), "no finite float32"),
        (Advantages(((np.zeros(3, np.float32),),)), "1 members"),
        (Advantages(((np.zeros(3, np.float32),), ())), "0 samples"),
        (Advantages(((np.zeros(3, np.float32),), (np.zeros(2, np.float32),))), "3 tokens"),
        (Advantages(((np.zeros(3, np.float32),), (np.full(3, np.inf, np.float32),))), "token 2"),
        (Advantages(np.array([1.0, -1.0]), {"x": ((np.zeros(3, np.float32),), ())}), "shaped"),
        (
            Advantages(
                np.array([1.0, -1.0]), {"x": ((np.zeros(3, np.float32),), (np.zeros(2, np.float32),))}
            ),
            "3 tokens",
        ),
        (Advantages(np.array([1.0, -1.0]), {"x": ((np.zeros(3),), (np.zeros(3),))}), "float64"),  # type: ignore[dict-item]
    ],
)
def test_an_algorithm_that_answers_nonsense_is_named(answer: Advantages, says: str) -> None:
    class Nonsense(Algorithm):
        name = "nonsense"

        def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
            return answer

    with pytest.raises(AlgorithmError, match=f"nonsense.*{says}"):
        process_group(rewarded(1, 0), rules(), Nonsense())


def test_a_group_whose_algorithm_failed_trains_nothing_and_keeps_the_cause() -> None:
    result = broken_group(rewarded(1, None), "TimeoutError: judge")
    assert fates(result) == ["failed", "failed"]
    assert "judge" in result.verdicts[0].reason
    assert "gone" in result.verdicts[1].reason
    assert result.dead == "failed"


def test_rules_come_from_the_config_and_the_environments_own_word() -> None:
    env = EnvSection(id="arithmetic", truncated_trains=False)
    made = GroupRules.of(env, BatchSection(seq_len=128), FiltersSection(pre=(SHORT,)), scores_groups=True)
    assert (made.env, made.seq_len, made.truncated_trains, made.all_or_nothing) == (
        "arithmetic",
        128,
        False,
        True,
    )
    never = env.model_copy(update={"all_or_nothing": False})
    assert not GroupRules.of(never, BatchSection(), FiltersSection(), scores_groups=True).all_or_nothing


MEMBERS = st.lists(
    st.tuples(
        st.sampled_from([COMPLETED, TRUNCATED, FAILED, CANCELLED, Outcome("cancelled", "stale")]),
        st.sampled_from([None, 0.0, 1.0, float("nan")]),
        st.integers(0, 3),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(MEMBERS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["cut", "drop"]))
def test_every_rollout_gets_one_verdict_and_only_queued_ones_have_samples(
    members: list[tuple[Outcome, float | None, int]],
    votes: bool,
    trains: bool,
    whole: bool,
    filtered_vote: bool,
    overlong: Any,
) -> None:
    group = closed(
        *[rollout(turn([1, 2], list(range(n))), reward=r, outcome=o) for o, r, n in members],
        size=len(members) or 1,
    )
    how = rules(
        seq_len=4,
        overlong=overlong,
        truncated_votes=votes,
        truncated_trains=trains,
        all_or_nothing=whole,
        filtered_vote=filtered_vote,
        pre=(SHORT,),
    )
    result = process_group(group, how, GRPO)
    assert [verdict.rollout for verdict in result.verdicts] == [each.id for each in group.rollouts]
    assert (result.dead is None) == ("queued" in fates(result))
    for verdict, (outcome, reward, n) in zip(result.verdicts, members, strict=True):
        assert bool(verdict.samples) == (verdict.fate == "queued")
        assert verdict.reason or verdict.fate == "queued"
        if verdict.fate == "queued":
            assert outcome.ending in ("completed", "truncated")
            assert reward in (0.0, 1.0)
            assert n >= SHORT.min_tokens
            assert verdict.advantage
    if whole and any(v.fate in ("failed", "cancelled", "stale") for v in result.verdicts):
        assert "queued" not in fates(result)
