"""Rollouts that begin anew within, or go back: as recorded, and as they are rolled out again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from sim_kit import Kept, simulation

from paceline.core.admission import FixedCap
from paceline.domain import events as on
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.task import TaskRef
from paceline.sim.records import blank_logprobs
from paceline.sim.workloads import Recorded, RolloutPlan, plan_of

TASK, REST = range(10, 1010), range(2000, 2096)
"""Ids of a prompt, and of an answer; a thousand and 96."""


def turn(prompt: Sequence[int], *, extends: bool = False, after: int = -1, first: int = 2000) -> Turn:
    ids = np.arange(first, first + 96, dtype=np.int32)
    prompt_ids = np.array(prompt, np.int32)
    return Turn(prompt_ids, ids, blank_logprobs(96), ((0, 96),), extends, "stop", after=after)


def rollout(*turns: Turn) -> Rollout:
    task = TaskRef("env", "train", 0, 0)
    return Rollout(id=RolloutId(1, 0, 0), task=task, outcome=COMPLETED, reward=1.0, turns=turns)


def rolled_out(plan: RolloutPlan) -> tuple[Rollout, list[int]]:
    """A simulated group of two whose members do it: one's record, and tokens of the contexts that it asked with."""
    kept = Kept()
    simulation(
        # Of equal rewards nothing could be trained.
        workload=Recorded({"env": [[plan, msgspec.structs.replace(plan, reward=0.0)]]}),
        admission=FixedCap(2),
        engines=1,
        group_size=2,
        batch=2,
        max_steps=1,
        folds=[kept],
    ).run(events=1000)
    events = [event for _, event, _ in kept.entries]
    record = next(e.rollout for e in events if isinstance(e, on.RolloutEnded) and e.rollout.turns)
    asked = [e.context_tokens for e in events if isinstance(e, on.TurnRequested) and e.rollout == record.id]
    return record, asked


def test_prompts_of_their_own_do_not_pile_up() -> None:
    plan = plan_of(rollout(*[turn(range(n, n + 1000)) for n in (10, 5000, 9000)]))
    assert plan.context == 1096
    record, asked = rolled_out(plan)
    assert asked == [1000, 1000, 1000]
    assert [t.extends for t in record.turns] == [False, False, False]
    assert [len(t.prompt_ids) for t in record.turns] == [1000, 1000, 1000]
    assert [t.cached_tokens for t in record.turns][1:] == [0, 0]


def test_blank_prompts_share_nothing() -> None:
    plan = plan_of(rollout(*[turn([0] * 1000) for _ in range(3)]))
    assert (plan.context, [s.found for s in plan.starts if s]) == (1096, [0, 0])


def test_what_a_compacted_history_keeps_is_cached_and_no_more() -> None:
    summary = range(7000, 7200)
    turns = [turn(TASK), turn(range(3000, 3100), extends=True), turn([*TASK, *summary])]
    plan = plan_of(rollout(*turns, turn(range(4000, 4050), extends=True)))
    record, asked = rolled_out(plan)
    assert asked == [1000, 1196, 1200, 1346]
    assert [t.extends for t in record.turns] == [False, True, False, True]
    # Whole blocks of what the context before it began with: the task, then all of the turn before.
    assert [t.cached_tokens for t in record.turns][1:] == [1088, 992, 1296]
    assert plan.context == 1442


def test_a_history_that_is_written_anew_keeps_what_is_alike() -> None:
    turns = [turn(TASK), turn([*TASK, *REST[:48], *range(3000, 3100)])]
    record, asked = rolled_out(plan_of(rollout(*turns)))
    assert asked == [1000, 1148]
    assert (record.turns[1].extends, record.turns[1].cached_tokens) == (False, 1040)


def test_a_turn_goes_back() -> None:
    turns = [turn(TASK), turn(range(3000, 3100), extends=True)]
    plan = plan_of(rollout(*turns, turn(range(4000, 4100), extends=True, after=0)))
    record, asked = rolled_out(plan)
    assert asked == [1000, 1196, 1196]
    assert [(t.extends, t.after) for t in record.turns] == [(False, -1), (True, -1), (True, 0)]
    assert record.turns[2].cached_tokens == 1088


def test_conversations_take_turns_and_keep_their_caches() -> None:
    other = range(7000, 7500)
    turns = [turn(TASK), turn(other), turn(range(3000, 3100), extends=True, after=0)]
    plan = plan_of(rollout(*turns, turn(range(4000, 4100), extends=True, after=1)))
    record, asked = rolled_out(plan)
    assert asked == [1000, 500, 1196, 696]
    assert [t.after for t in record.turns] == [-1, -1, 0, 1]
    assert [t.cached_tokens for t in record.turns][1:] == [0, 1088, 592]


def test_ordinary_turns_need_no_more_than_before() -> None:
    turns = [turn(TASK), turn(range(3000, 3100), extends=True), turn(range(4), extends=True, after=1)]
    assert plan_of(rollout(*turns)).starts == ()
