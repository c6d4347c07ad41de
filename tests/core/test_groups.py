"""When a group closes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.groups import GroupLedger
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Outcome, Rollout
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError

TASK = TaskRef("env", "train", 0)


def ended(rollout: RolloutId, outcome: Outcome = COMPLETED) -> Rollout:
    return Rollout(id=rollout, task=TASK, outcome=outcome)


@given(st.integers(1, 8), st.integers(0, 8), st.permutations(range(8)))
def test_a_group_closes_once_at_its_last_member_however_many_are_given_up(
    size: int, started: int, order: list[int]
) -> None:
    ledger = GroupLedger()
    group = ledger.open(0, TASK, size, seed=1)
    running = [group.next_member() for _ in range(min(size, started))]
    given_up, closed = ledger.give_up_unlaunched(0)
    assert given_up == size - len(running)
    members = [running[n] for n in order if n < len(running)]
    for number, member in enumerate(members):
        assert closed is None
        closed = ledger.settle(ended(member))
        assert (closed is not None) is (number == len(members) - 1)
    assert closed is not None
    assert [r.id for r in closed.rollouts] == members
    assert 0 not in ledger
    with pytest.raises(InvariantError, match="not open"):
        ledger.settle(ended(RolloutId(0, 0)))


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=12))
def test_a_retry_is_the_next_attempt_at_the_same_member(size: int, failures: list[int]) -> None:
    ledger = GroupLedger()
    group = ledger.open(3, TASK, size, seed=1)
    running = {member: group.next_member() for member in range(size)}
    for member in failures:
        if member < size:
            group.retries.append(ended(running[member], Outcome("failed", "engine")))
            assert group.owes_launches
            following = group.next_member()
            assert following == running[member]._replace(attempt=running[member].attempt + 1)
            running[member] = following
    assert not group.owes_launches
    closed = [ledger.settle(ended(rollout)) for rollout in running.values()][-1]
    assert closed is not None
    assert {r.id.member for r in closed.rollouts} == set(range(size))


def test_a_retry_that_is_given_up_settles_its_member_with_the_attempt_that_failed() -> None:
    ledger = GroupLedger()
    group = ledger.open(0, TASK, 2, seed=1)
    first, second = group.next_member(), group.next_member()
    group.retries.append(ended(first, Outcome("failed", "engine", "503")))
    assert ledger.settle(ended(second)) is None
    given_up, closed = ledger.give_up_unlaunched(0)
    assert given_up == 0
    assert closed is not None
    assert {r.id for r in closed.rollouts} == {first, second}


def test_two_groups_of_one_task_have_nothing_in_common() -> None:
    ledger = GroupLedger()
    a, b = ledger.open(0, TASK, 1, seed=1), ledger.open(1, TASK, 1, seed=2)
    assert a.next_member().group == 0
    closed = ledger.settle(ended(b.next_member()))
    assert closed is not None
    assert closed.id == 1
    assert 0 in ledger
    with pytest.raises(InvariantError, match="open already"):
        ledger.open(0, TASK, 1, seed=1)
