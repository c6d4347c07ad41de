"""The batch list: freshness, readiness, the cut; and the end of a run that brings nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_records import closed, queued, rewarded, rollout, rules, sample, turn

from paceline.config.filters import LengthFilter
from paceline.core.advantages import builtin
from paceline.core.batching import BatchList, DeadStreak
from paceline.core.processing import process_group
from paceline.domain.batch import Batch
from paceline.domain.group import Verdict
from paceline.domain.sample import Sample
from paceline.errors import InvariantError, NoProgressError

GRPO = builtin("grpo", {})


def filled(*samples: Sample, **size: Any) -> BatchList:
    waiting = BatchList(**(size or {"rollouts": 2}))
    for number, each in enumerate(samples):
        waiting.add(
            queued(msgspec.structs.replace(each, rollout=each.rollout._replace(member=number))), each.env
        )
    return waiting


def members(batch: Batch) -> list[int]:
    return [rollout.member for rollout in batch.rollouts]


@pytest.mark.parametrize(
    ("bound", "started", "trains", "kept"),
    [(0, 5, 5, True), (0, 5, 6, False), (2, 5, 7, True), (2, 5, 8, False)],
)
def test_s14_the_staleness_bound_has_exact_edges(bound: int, started: int, trains: int, kept: bool) -> None:
    waiting = filled(sample(version=started))
    found = waiting.sweep(trains + 1, bound, {})
    assert (len(waiting) == 1) is kept
    assert [(stale.action, stale.staleness) for stale in found] == (
        [] if kept else [("dropped", trains - started)]
    )


def test_s14_a_rollout_that_went_on_under_newer_weights_counts_from_its_oldest() -> None:
    waiting = filled(sample(5, versions=((5, 2), (6, 2))))
    assert waiting.sweep(8, 2, {}) == []
    assert [stale.staleness for stale in waiting.sweep(9, 2, {})] == [3]


def test_a_batch_is_not_cut_from_a_list_that_holds_what_a_sweep_would_have_found() -> None:
    waiting = filled(sample(version=5), sample(version=7))
    with pytest.raises(InvariantError, match="step 9 takes v6 or newer, but the list holds v5"):
        waiting.cut(9, bound=2)
    waiting.sweep(9, 2, {"env": "train"})
    assert members(waiting.cut(9, bound=2)) == [0, 1]


def test_s15_what_grew_old_in_the_queue_is_dropped_before_readiness_is_judged() -> None:
    waiting = filled(*[sample(version=5)] * 2, *[sample(version=9)] * 2, rollouts=4)
    assert waiting.ready()
    found = waiting.sweep(10, 2, {"env": "drop"})
    assert [(stale.env, stale.action, stale.tokens, stale.staleness) for stale in found] == [
        ("env", "dropped", 3, 4)
    ] * 2
    assert "stale in queue" in found[0].reason
    assert not waiting.ready()
    assert len(waiting) == 2
    waiting.add(queued(sample(group=1, version=9)), "env")
    waiting.add(queued(sample(group=2, version=9)), "env")
    assert waiting.ready()
    assert [rollout.group for rollout in waiting.cut(10).rollouts] == [0, 0, 1, 2]


def test_s18_strictly_on_policy_still_ships() -> None:
    waiting = filled(*[sample(version=0)] * 4, rollouts=4)
    assert waiting.sweep(1, 0, {}) == []
    assert members(waiting.cut(1)) == [0, 1, 2, 3]


def test_on_stale_train_keeps_and_counts_once() -> None:
    waiting = filled(sample(version=0), sample(version=3))
    assert [stale.action for stale in waiting.sweep(4, 1, {"env": "train"})] == ["trained"]
    assert waiting.sweep(5, 1, {"env": "train"}) == []
    assert members(waiting.cut(5)) == [0, 1]


def test_on_stale_mask_tokens_masks_exactly_the_old_ones_and_keeps_the_place() -> None:
    mixed = sample(6, versions=((1, 2), (4, 3)), advantage=np.arange(6, dtype=np.float32))
    waiting = filled(mixed, sample(version=4), sample(version=1))
    found = waiting.sweep(5, 2, {"env": "mask_tokens"})
    assert [(stale.rollout.member, stale.action, stale.tokens) for stale in found] == [
        (0, "masked", 2),
        (2, "dropped", 3),
    ]
    batch = waiting.cut(5)
    assert members(batch) == [0, 1]
    masked = batch.samples[0]
    assert masked.trainable.tolist() == [False, False, False, True, True, True]
    assert masked.logprobs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
    assert masked.advantage.tolist() == [0, 0, 0, 3, 4, 5]  # type: ignore[union-attr]
    assert masked.versions == ((4, 3),)
    assert mixed.trainable.sum() == 5  # the record before is as it was


def test_s45_a_token_threshold_counts_what_ships() -> None:
    x = rollout(turn([1] * 10, [2] * 50), turn([1] * 70, [], extends=False), reward=1.0)
    y = rollout(turn([1] * 20, [2] * 25), reward=0.0)
    first, second = process_group(closed(x, y), rules(seq_len=128), GRPO).verdicts
    waiting = BatchList(tokens=100)
    assert waiting.add(first, "env").tokens == 60
    assert not waiting.ready()
    waiting.add(second, "env")
    assert (waiting.tokens, waiting.ready()) == (105, True)
    batch = waiting.cut(1)
    assert (len(batch.samples), batch.tokens, waiting.tokens) == (2, 105, 0)


def test_s46_rollouts_without_signal_never_enter_so_no_batch_is_empty() -> None:
    waiting = BatchList(rollouts=2)
    for group in (rewarded(1, 1), rewarded(1, 0)):
        for verdict in process_group(group, rules(), GRPO).verdicts:
            if verdict.fate == "queued":
                waiting.add(verdict, "env")
    assert waiting.ready()
    assert len(waiting.cut(1).rollouts) == 2


def test_s43_a_short_last_batch_is_cut_only_when_asked_for() -> None:
    waiting = filled(*[sample()] * 3, rollouts=4)
    with pytest.raises(InvariantError, match="3 rollouts"):
        waiting.cut(1)
    assert members(waiting.cut(1, short=True)) == [0, 1, 2]
    with pytest.raises(InvariantError):
        waiting.cut(2, short=True)


def test_s43_what_is_left_over_can_be_reported() -> None:
    waiting = filled(*[sample()] * 3, rollouts=4)
    assert [entry.rollout.member for entry in waiting.clear()] == [0, 1, 2]
    assert (len(waiting), waiting.tokens) == (0, 0)


def test_s48_surplus_carries_over_in_order_of_closing() -> None:
    waiting = BatchList(rollouts=4)
    for group in range(3):
        for member in range(3):
            waiting.add(queued(sample(group=group, member=member)), "env")
    shipped = [waiting.cut(step).rollouts for step in (1, 2)]
    assert [(r.group, r.member) for batch in shipped for r in batch] == [divmod(i, 3) for i in range(8)]
    assert (len(waiting), waiting.ready()) == (1, False)
    waiting.add(queued(sample(group=9)), "env")
    assert [r.group for r in waiting.cut(3, short=True).rollouts] == [2, 9]


def test_s50_what_shipped_is_not_held_any_longer() -> None:
    waiting = BatchList(rollouts=10)
    alive: list[weakref.ref[Any]] = []
    for step in range(1, 6):
        for member in range(10):
            side = np.zeros(1000, np.float32)
            alive.append(weakref.ref(side))
            waiting.add(queued(sample(group=step, member=member, streams={"side": side})), "env")
            del side
        waiting.cut(step)
        gc.collect()
        assert not any(ref() is not None for ref in alive)
    assert not waiting._by_version


def test_nothing_enters_twice_or_without_a_right_to() -> None:
    waiting = filled(sample())
    with pytest.raises(InvariantError, match="already"):
        waiting.add(queued(sample()), "env")
    with pytest.raises(InvariantError, match="zero_signal"):
        waiting.add(Verdict(sample().rollout, "zero_signal"), "env")


def test_tokens_of_a_version_that_is_yet_to_come_are_never_shipped() -> None:
    with pytest.raises(InvariantError, match="v3"):
        filled(sample(version=3), rollouts=1).cut(3)


def test_a_snapshot_is_plain_data_and_restores_the_same_list() -> None:
    fancy = sample(
        4,
        version=2,
        advantage=np.arange(4, dtype=np.float32),
        streams={"experts": np.ones((4, 2), np.uint8)},
        ending="truncated",
        cut_tokens=3,
    )
    waiting = filled(fancy, sample(version=0), rollouts=2)
    waiting.sweep(4, 1, {"env": "train"})
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(waiting.snapshot()))
    again = BatchList(rollouts=2)
    again.restore(data)
    assert again.sweep(4, 1, {"env": "train"}) == []  # counted before the snapshot
    assert again.tokens == waiting.tokens
    before, after = waiting.cut(4), again.cut(4)
    assert after.rollouts == before.rollouts
    for old, new in zip(before.samples, after.samples, strict=True):
        for name in Sample.__struct_fields__:
            theirs, ours = getattr(old, name), getattr(new, name)
            if name == "streams":
                assert theirs.keys() == ours.keys()
                assert all((theirs[k] == ours[k]).all() and theirs[k].dtype == ours[k].dtype for k in theirs)
            elif isinstance(theirs, np.ndarray):
                assert theirs.dtype == ours.dtype
                assert (theirs == ours).all()
                assert not ours.flags.writeable
            else:
                assert theirs == ours
    with pytest.raises(InvariantError, match="empty"):
        filled(sample()).restore(data)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.sampled_from(["a", "b", "c"])),
        st.tuples(st.just("cut"), st.just(0), st.just("")),
        st.tuples(st.just("sweep"), st.just(0), st.just("")),
    ),
    max_size=60,
)
ON_STALE: Any = {"a": "drop", "b": "train", "c": "mask_tokens"}


@settings(deadline=None)
@given(ACTIONS, st.integers(0, 2), st.booleans())
def test_nothing_is_lost_nothing_twice_and_nothing_staler_than_the_bound(
    actions: list[tuple[str, int, str]], bound: int, by_tokens: bool
) -> None:
    waiting = BatchList(tokens=9) if by_tokens else BatchList(rollouts=3)
    step, added = 1, 0
    order: list[int] = []
    gone: set[int] = set()
    for action, age, env in actions:
        if action == "add":
            oldest = max(0, step - 1 - age)
            made = sample(5, group=added, env=env, versions=((oldest, 2), (step - 1, 2)))
            waiting.add(queued(made), env)
            added += 1
            continue
        for stale in waiting.sweep(step, bound, ON_STALE):
            assert stale.staleness > bound
            if stale.action == "dropped":
                gone.add(stale.rollout.group)
        if action == "cut" and waiting.ready():
            batch = waiting.cut(step)
            if not by_tokens:
                assert len(batch.rollouts) == 3
            order += [r.group for r in batch.rollouts]
            for each in batch.samples:
                assert each.trainable_tokens == each.trainable.sum()
                assert each.env == "b" or step - 1 - each.oldest_version <= bound
            step += 1
    left = [entry.rollout.group for entry in waiting.clear()]
    assert order + left == sorted(set(range(added)) - gone)


def dead(kind: str) -> Any:
    if kind == "failed":
        return process_group(rewarded(None, None), rules(), GRPO)
    if kind == "void":
        return process_group(rewarded(1, None), rules(all_or_nothing=True), GRPO)
    return process_group(rewarded(1, 0), rules(pre=(LengthFilter(type="length", min_tokens=9),)), GRPO)


def test_s04_a_survivor_starts_the_count_anew() -> None:
    streak = DeadStreak(6)
    for result in (
        [dead("failed")] * 5 + [process_group(rewarded(1, 0), rules(), GRPO)] + [dead("failed")] * 5
    ):
        streak.add(result, "a")
    assert streak.length == 5


def test_s04_seven_deaths_of_three_kinds_end_the_run_with_their_counts_and_the_last_error() -> None:
    streak = DeadStreak(6)
    kinds = ["failed", "failed", "void", "filtered", "failed", "void"]
    for kind in kinds:
        streak.add(dead(kind), "a")
    with pytest.raises(NoProgressError) as caught:
        streak.add(dead("filtered"), "a")
    text = str(caught.value)
    assert "7 groups" in text
    assert "failed 3, void 2, filtered 2" in text
    assert "EngineError: gone" in text


def test_s04_the_error_of_an_algorithm_is_the_last_one() -> None:
    streak = DeadStreak(1)
    streak.add(dead("failed"), "a")
    with pytest.raises(NoProgressError, match="judge is away"):
        streak.add(dead("filtered"), "a", error="judge is away")
