"""Which evals are due, when one is complete, and what it measured."""

from __future__ import annotations

from itertools import combinations
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import CANCELLED, FAILED, TRUNCATED, closed, rollout, turn

from paceline.config.environment import EvalSection
from paceline.core.evaluation import EvalEpoch, EvalPlan, pass_at
from paceline.domain.group import ClosedGroup
from paceline.domain.rollout import COMPLETED
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError


def plan(every: int = 5, last: int = 100, **more: bool) -> EvalPlan:
    return EvalPlan([EvalSection(id="held-out", every=every, **more)], last=last)


def run(points: EvalPlan, versions: range | list[int]) -> list[int]:
    return [due.version for version in versions for due in points.held(version)]


def example(index: int, *rewards: float | None, k: int = 0) -> ClosedGroup:
    members = [rollout(reward=r, outcome=FAILED if r is None else COMPLETED) for r in rewards]
    return closed(*members, size=k or len(members), task=TaskRef("held-out", "eval", index))


def test_s84_a_fresh_run_measures_each_point_once() -> None:
    points = plan()
    assert run(points, range(13)) == [0, 5, 10]
    assert run(points, range(13)) == []
    assert run(plan(at_start=False), range(13)) == [5, 10]


def test_s84_the_last_version_is_measured_whatever_the_interval_says() -> None:
    assert run(plan(last=12), range(13)) == [0, 5, 10, 12]
    assert run(plan(last=10), range(11)) == [0, 5, 10]
    assert run(plan(last=12, at_end=False), range(13)) == [0, 5, 10]


def test_s84_a_clean_resume_goes_on_and_a_crash_measures_again() -> None:
    before = plan()
    run(before, range(11))
    before.complete("held-out", 5)
    crashed = plan()
    crashed.restore(before.snapshot())
    assert run(crashed, range(10, 16)) == [10, 15]
    before.complete("held-out", 10)
    clean = plan()
    clean.restore(before.snapshot())
    assert run(clean, range(10, 16)) == [15]


def test_s84_a_point_that_was_jumped_over_is_measured_with_what_came_instead() -> None:
    points = plan()
    points.held(4)
    (due,) = points.held(6)
    assert (due.version, due.points) == (6, (5,))
    assert "v5" in due.reason
    (both,) = points.held(17)
    assert (both.version, both.points) == (17, (10, 15))


def test_s84_environments_are_independent() -> None:
    points = EvalPlan([EvalSection(id="a", every=5), EvalSection(id="b", every=3)], last=100)
    assert [(due.env, due.version) for v in range(11) for due in points.held(v)] == [
        ("a", 0), ("b", 0), ("b", 3), ("a", 5), ("b", 6), ("b", 9), ("a", 10),
    ]  # fmt: skip


def test_s84_a_run_that_ends_early_measures_where_it_ended() -> None:
    points = plan()
    assert run(points, range(8)) == [0, 5]
    points.end_at(7)
    assert run(points, [7, 7]) == [7]


def test_s82_an_epoch_is_complete_when_nothing_is_owed() -> None:
    epoch = EvalEpoch("held-out", 3, examples=2, k=3)
    assert epoch.draw() == 0
    epoch.settle(example(0, 1, 0, 1))
    assert (epoch.draw(), epoch.undrawn) == (1, 0)  # its members may not even be launched
    assert (epoch.owed, epoch.complete) == (3, False)
    with pytest.raises(InvariantError, match="3 rollouts are owed"):
        epoch.report()
    assert (epoch.settled, epoch.so_far().rollouts, epoch.so_far().mean_reward) == (
        1,
        3,
        pytest.approx(2 / 3),
    )
    epoch.settle(example(1, 0, None, 0))
    assert epoch.complete
    report = epoch.report()
    assert (report.rollouts, report.scored, report.mean_reward) == (6, 5, pytest.approx(0.4))
    assert report.by_ending == {"completed": 5, "failed": 1}


def test_s83_evals_do_not_age() -> None:
    epoch = EvalEpoch("held-out", 3, examples=1, k=2)
    epoch.draw()
    late = rollout(turn([1], [2, 3], versions=((3, 1), (8, 1))), reward=1.0)
    epoch.settle(
        closed(late, rollout(turn([1], [2], versions=((3, 1),)), reward=0.0), task=TaskRef("e", "eval", 0))
    )
    report = epoch.report()
    assert (report.version, report.newest_version, report.scored) == (3, 8, 2)
    assert report.mean_tokens == 1.5


@pytest.mark.parametrize("k", [1, 3])
def test_s85_each_example_is_rolled_out_exactly_k_times(k: int) -> None:
    epoch = EvalEpoch("held-out", 0, examples=10, k=k)
    drawn = [epoch.draw() for _ in range(10)]
    assert drawn == list(range(10))
    with pytest.raises(InvariantError, match="all 10"):
        epoch.draw()
    for index in reversed(drawn):
        epoch.settle(example(index, *[float(index % 2)] * k))
        with pytest.raises(InvariantError, match="settled before"):
            epoch.settle(example(index, *[1.0] * k))
    report = epoch.report()
    assert (report.rollouts, report.scored, report.mean_reward) == (10 * k, 10 * k, 0.5)
    other = EvalEpoch("held-out", 0, examples=1, k=k)
    other.draw()
    with pytest.raises(InvariantError, match="where k is"):
        other.settle(example(0, *[1.0] * (k + 1)))


def test_members_that_were_never_launched_count_as_cancelled() -> None:
    epoch = EvalEpoch("held-out", 0, examples=1, k=3)
    epoch.draw()
    cut = rollout(reward=0.0, outcome=TRUNCATED)
    epoch.settle(closed(cut, rollout(reward=None, outcome=CANCELLED), size=3, task=TaskRef("e", "eval", 0)))
    report = epoch.report()
    assert report.by_ending == {"cancelled": 2, "truncated": 1}
    assert (report.rollouts, report.scored, report.mean_reward) == (3, 1, 0.0)


def test_pass_at_is_unbiased_and_only_for_binary_rewards() -> None:
    assert pass_at([[1, 0, 0, 0]], 4) == {1: 0.25, 2: 0.5, 4: 1.0}
    assert pass_at([[1, 0.5]], 2) == {}
    assert pass_at([[], []], 2) == {}
    assert pass_at([[1, 0], [1]], 2) == {1: 0.75, 2: 1.0}  # one rollout says nothing about two
    assert set(pass_at([[0.0] * 6], 6)) == {1, 2, 4}


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
def test_pass_at_is_the_share_of_subsets_with_one_right(rewards: list[float]) -> None:
    for j, value in pass_at([rewards], len(rewards)).items():
        subsets = list(combinations(rewards, j))
        assert isclose(value, sum(any(each) for each in subsets) / len(subsets))
