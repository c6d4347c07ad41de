"""Where every token went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.told import FAILED, Told
from observe.worlds import EnvShape, Shape, World, sample
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.rollout import Outcome
from paceline.journal import FileJournal, read_journal
from paceline.observe.account import PLACES, Line
from paceline.observe.account import goodput as goodput_of
from paceline.observe.run import RunFolds, summary

GUESS = EnvShape("guess-number", turns=(1, 4), tokens=(2.2, 0.8), wait_s=0.4, start=0.3, end=0.8, fail=0.1)
MIXED = (EnvShape("reverse-text", tokens=(4.0, 1.2)), GUESS)


def line_of(told: Told, env: str = "a", split: str = "train") -> Line:
    return next(line for line in told.folds.account.lines() if (line.env, line.split) == (env, split))


def nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {place: count for place, count in counts.items() if count}


@pytest.mark.parametrize("seed", range(12))
def test_tokens_and_rollouts_are_conserved_after_every_decision(seed: int) -> None:
    world = World(
        Shape(envs=MIXED, evals=MIXED, steps=4, engines=1 + seed % 2, bound=1, lag=seed % 2, seed=seed)
    )
    folds = RunFolds()
    for decision in world.decisions:
        folds.apply(decision.at, decision.event, decision.commands)
        for line in folds.account.lines():
            assert line.is_conserved, line
    assert summary(folds)["status"] == "done"
    assert summary(folds)["tokens_conserved"] is True
    lines = folds.account.lines()
    assert not any(line.rollouts["in_flight"] or line.rollouts["queued"] for line in lines)
    shipped = sum(
        len(c.batch.rollouts) for d in world.decisions for c in d.commands if isinstance(c, do.ShipBatch)
    )
    assert sum(line.rollouts["shipped"] for line in lines) == shipped


def test_the_worlds_of_these_tests_reach_most_places() -> None:
    folds = RunFolds()
    for seed in range(4):
        folds.read(World(Shape(envs=MIXED, evals=MIXED, steps=6, bound=1, seed=seed)).decisions)
    reached = {place for line in folds.account.lines() for place, count in line.rollouts.items() if count}
    assert reached >= {
        "shipped",
        "zero_signal",
        "failed",
        "cancelled",
        "stale",
        "filtered",
        "left_over",
        "eval",
    }
    assert sum(line.tokens["overlong"] for line in folds.account.lines()) > 0


async def test_a_journal_file_gives_the_same_account_and_rows_as_the_live_run(tmp_path: Path) -> None:
    world = World(Shape(envs=MIXED, evals=MIXED, steps=4))
    live = RunFolds()
    journal = FileJournal(tmp_path, "demo")
    for decision in world.decisions:
        live.apply(decision.at, decision.event, decision.commands)
        journal.append(decision.at, decision.event, decision.commands)
    await journal.close()
    read = RunFolds()
    read.read(read_journal(tmp_path))
    assert read.account.lines() == live.account.lines()
    assert [row.flat() for row in read.training.steps] == [row.flat() for row in live.training.steps]
    assert read.lengths.bias() == live.lengths.bias()
    assert read.spans.lanes() == live.spans.lanes()
    assert summary(read) == summary(live)


def test_a_rollout_moves_from_in_flight_to_queued_to_shipped() -> None:
    told = Told()
    (one,) = told.start(0)
    told.call(one, 10)
    assert nonzero(line_of(told).tokens) == {"in_flight": 10}
    told.end(one, 10)
    assert nonzero(line_of(told).tokens) == {"queued": 10}
    told.process([told.verdict(one)])
    assert nonzero(line_of(told).rollouts) == {"queued": 1}
    told.ship(1, [one])
    assert nonzero(line_of(told).tokens) == {"shipped": 10}
    assert told.folds.lives.unsettled == {}


def test_an_attempt_that_is_retried_is_failed_and_its_retry_is_its_own_rollout() -> None:
    told = Told()
    (first,) = told.start(0)
    told.call(first, 4)
    told.end(first, 4, reward=None, outcome=Outcome("failed", "engine", "gone"))
    (second,) = told.start(0, attempt=1)
    assert nonzero(line_of(told).rollouts) == {"failed": 1, "in_flight": 1}
    told.call(second, 6)
    told.end(second, 6)
    told.process([told.verdict(second)])
    told.ship(1, [second])
    assert nonzero(line_of(told).tokens) == {"failed": 4, "shipped": 6}
    assert line_of(told).launched == 2


def test_what_was_cut_off_is_overlong_and_what_was_masked_is_stale() -> None:
    told = Told()
    cut, masked = told.start(0, 2)
    for rollout in (cut, masked):
        told.call(rollout, 100)
        told.end(rollout, 100)
    told.process([told.verdict(cut, cut=30), told.verdict(masked)])
    told.tell(on.TimerFired(), do.NoteStale(masked, "masked", 60))
    kept = sample(told.rollouts[masked], cut=60)
    told.ship(1, [cut, masked], [sample(told.rollouts[cut], cut=30), kept])
    assert nonzero(line_of(told).tokens) == {"shipped": 110, "stale": 60, "overlong": 30}
    assert line_of(told).is_conserved


def test_a_queued_rollout_that_grows_too_old_is_stale() -> None:
    told = Told()
    (one,) = told.start(0)
    told.end(one, 10)
    told.process([told.verdict(one)])
    told.tell(on.TimerFired(), do.NoteStale(one, "trained", 10))
    assert nonzero(line_of(told).tokens) == {"queued": 10}
    told.tell(on.TimerFired(), do.NoteStale(one, "dropped", 10))
    assert nonzero(line_of(told).tokens) == {"stale": 10}


def test_tokens_that_an_engine_sampled_and_the_record_lacks_are_still_accounted_for() -> None:
    told = Told()
    (one,) = told.start(0)
    told.call(one, 10)
    told.end(one, 0, reward=None, outcome=FAILED)
    told.process([told.verdict(one, "failed", advantage=None)])
    assert nonzero(line_of(told).tokens) == {"failed": 10}


def test_a_shell_that_reports_no_turns_is_accounted_for_by_its_records() -> None:
    told = Told()
    (one,) = told.start(0)
    told.end(one, 12)
    assert line_of(told).sampled == 12
    assert line_of(told).is_conserved


def test_goodput_is_shipped_over_sampled_for_training_and_evals_are_in_neither() -> None:
    told = Told()
    assert goodput_of(told.folds.account.lines()) is None
    good, bad = told.start(0, 2)
    (held_out,) = told.start(1, split="eval")
    for rollout, tokens in ((good, 30), (bad, 10), (held_out, 1000)):
        told.call(rollout, tokens)
        told.end(rollout, tokens)
    told.process([told.verdict(good), told.verdict(bad, "filtered")])
    told.ship(1, [good])
    assert goodput_of(told.folds.account.lines()) == told.folds.account.goodput() == 0.75
    assert nonzero(line_of(told, split="eval").tokens) == {"eval": 1000}


def test_a_prompt_that_an_engine_had_before_and_computes_again_is_recomputed() -> None:
    told = Told()
    (one,) = told.start(0)
    told.call(one, 20, context=100, cached=0)
    told.call(one, 20, context=130, cached=120)  # all that it had is still there: 10 new
    told.call(one, 20, context=160, cached=50)  # of the 150 it had, 100 are gone
    line = line_of(told)
    assert (line.prefill, line.prefill_cached, line.prefill_recomputed) == (100 + 10 + 110, 170, 100)


def test_after_a_resumption_only_what_the_checkpoint_held_is_still_queued() -> None:
    told = Told()
    (kept,), (lost,), (running,) = told.start(0), told.start(1), told.start(2)
    told.end(kept, 10)
    told.end(lost, 10)
    told.process([told.verdict(kept)])
    told.tell(on.TimerFired(), do.SaveCheckpoint(3, {}))
    told.process([told.verdict(lost)])
    told.call(running, 5)
    told.tell(on.RunOpened("told", 7, resumed_from=3))
    assert nonzero(line_of(told).tokens) == {"queued": 10, "left_over": 10, "cancelled": 5}
    assert told.folds.lives.in_flight == {"train": 0, "eval": 0}
    told.ship(4, [kept])
    told.finish()
    assert nonzero(line_of(told).tokens) == {"shipped": 10, "left_over": 10, "cancelled": 5}


def test_a_run_that_died_before_its_first_checkpoint_leaves_nothing_in_flight_or_queued() -> None:
    told = Told()
    (lost,), (running,) = told.start(0), told.start(1)
    told.end(lost, 10)
    told.process([told.verdict(lost)])
    told.call(running, 5)
    told.tell(on.RunOpened("told", 7))
    told.start(0)
    line = line_of(told)
    assert nonzero(line.tokens) == {"left_over": 10, "cancelled": 5}
    assert nonzero(line.rollouts) == {"left_over": 1, "cancelled": 1, "in_flight": 1}
    assert told.folds.lives.in_flight == {"train": 1, "eval": 0}
    assert told.folds.training.segment == 1


def test_what_is_queued_when_a_run_is_stopped_waits_for_a_resumption() -> None:
    told = Told()
    (one,) = told.start(0)
    told.end(one, 10)
    told.process([told.verdict(one)])
    told.finish("stopped")
    assert nonzero(line_of(told).tokens) == {"queued": 10}


@pytest.mark.parametrize("last", [None, "failed", "stopped"])
def test_what_a_kill_or_an_error_left_under_way_is_followed_into_the_next_life(last: Any) -> None:
    told = Told()
    running, ended, lost = told.start(0, members=3)
    told.call(running, 10)
    told.call(lost, 5)
    told.end(ended, 10)
    if last is not None:  # a kill leaves no last word
        told.tell(on.RunFailed("the trainer died"), do.FinishRun(last, "the trainer died"))
        assert nonzero(line_of(told).tokens) == {"in_flight": 15, "queued": 10}
    told.tell(on.RunOpened("told", 7, resumed_from=3, recovered=True, continues=(running,)))
    told.end(lost, 5, outcome=Outcome("failed", "restart"))
    retried = lost._replace(attempt=1)
    told.rollouts[retried] = told.rollouts[lost]
    again = do.StartRollout(retried, told.rollouts[lost].task, 0, 2, "e0", 0)
    told.tell(on.TimerFired(), again, do.ContinueRollout(running, again.task, 0, 0, "e0", 0, 0.0, 10, 1, ""))
    told.tell(on.RolloutContinued(running, 8, 2, 1, True, 0, "not written"))
    told.call(running, 4)
    told.end(running, 12)
    told.end(retried, 20)
    told.process([told.verdict(one) for one in (running, ended, retried)])
    told.ship(4, [running, ended])
    assert nonzero(line_of(told).tokens) == {"shipped": 22, "failed": 7, "queued": 20}
    assert told.folds.lives.in_flight == {"train": 0, "eval": 0}
    assert told.folds.lives.strays == 0


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 50)), max_size=12))
def test_every_fate_keeps_its_rollouts_and_tokens(stories: list[tuple[str, int]]) -> None:
    told = Told(live=True)
    expected: dict[str, int] = {}
    for group, (fate, tokens) in enumerate(stories):
        expected[fate] = expected.get(fate, 0) + tokens
        (one,) = told.start(group, split="eval" if fate == "eval" else "train")
        told.call(one, tokens)
        if fate == "in_flight":
            continue
        told.end(one, tokens)
        if fate == "eval":
            continue
        told.process([told.verdict(one, fate if fate not in ("shipped", "queued") else "queued")])  # type: ignore[arg-type]
        if fate == "shipped":
            told.ship(group + 1, [one])
    found: dict[str, int] = {}
    for line in told.folds.account.lines():
        assert line.is_conserved
        for place, count in line.tokens.items():
            found[place] = found.get(place, 0) + count
    assert nonzero(found) == nonzero(expected)
