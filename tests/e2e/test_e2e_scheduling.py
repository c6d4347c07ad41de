"""Short runs of the demo policy under policies that cut, hold, race or reorder rollouts, on the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_kit import CommandLine, records

from paceline.core.staleness import staleness
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.journal import read_rollouts
from paceline.observe.run import RunFolds

pytestmark = [pytest.mark.torch, pytest.mark.demo, pytest.mark.timeout(600)]

STEPS = 6


class Run:
    """A run that has ended well, as its journal tells it."""

    def __init__(self, root: Path, **options: Any) -> None:
        run = CommandLine(root, run__max_steps=STEPS, sampling__max_tokens=24, **options)
        assert run.end(within_s=540) == 0, run.said
        assert (run.status.status, run.summary["steps"]) == ("done", STEPS), run.said
        assert run.summary["tokens_conserved"] is True
        self.folds = RunFolds()
        self.commands: list[Command] = []
        self.ended: dict[RolloutId, Rollout] = {}
        for record in records(run.run_dir):
            self.folds.apply(record.at, record.event, record.commands)
            self.commands += record.commands
            if isinstance(record.event, on.RolloutEnded):
                self.ended[record.event.rollout.id] = record.event.rollout
        self.dir = run.run_dir

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def late(self) -> list[int]:
        batches = [command.batch for command in self.of(do.ShipBatch)]
        return [staleness(sample.oldest_version, batch.step) for batch in batches for sample in batch.samples]

    def places(self, name: str) -> int:
        return sum(line.rollouts[name] for line in self.folds.account.lines() if line.split == "train")  # type: ignore[index]


def test_unbiased_tail_puts_off_and_has_the_same_responses_back(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        scheduling__type="unbiased_tail",
        scheduling__cutoff_tokens=8,
        algorithm__name="rloo",
        trainer__lr=1e-9,
    )
    deferred = [r for r in run.ended.values() if r.outcome.cause == "deferred"]
    assert deferred
    assert all(r.sampled_tokens == 8 for r in deferred)
    # Those that a late round ended, or the end of the run, are not counted as put off twice.
    assert run.places("deferred") >= len(deferred) > 0
    assert set(run.late) == {0}
    puts = {put.number: put for put in run.of(do.PutOff)}
    back = [start for start in run.of(do.StartRollout) if start.put_off]
    assert back
    tokens = {r.id: r for r in read_rollouts(run.dir)}
    compared = 0
    for start in back:
        first = tokens[puts[start.put_off].again[start.rollout.member]]
        again = tokens[start.rollout]
        assert start.noise_seed == puts[start.put_off].noise[start.rollout.member]
        if again.outcome.ending == "cancelled":
            continue  # by the end of the run
        # The policy does not move here, so the same noise gives the same response: its first tokens, and then more.
        assert again.sampled_tokens > 8
        assert np.array_equal(first.turns[0].sampled_ids, again.turns[0].sampled_ids[:8])
        compared += 1
    assert compared > 5


def test_overprovision_trains_what_was_late_in_a_later_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="overprovision", scheduling__factor=1.5)
    assert run.places("discarded") == 0
    assert 0 < max(run.late) <= 4


def test_overprovision_counts_what_it_throws_away(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="overprovision", scheduling__factor=1.5, scheduling__late="discard")
    assert run.places("discarded") > 0
    assert set(run.late) == {0}


def test_partial_rollouts_go_on_in_the_next_round_under_its_weights(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="partial", scheduling__budget_tokens=4, scheduling__max_staleness=8)
    assert max(grant.max_tokens or 0 for grant in run.of(do.GrantTurn)) <= 4
    assert run.of(do.ParkRollout)
    mixed = [s for c in run.of(do.ShipBatch) for s in c.batch.samples if len(s.versions) > 1]
    assert mixed
    assert max(run.late) <= 8
    segments = [turn.segments for rollout in run.ended.values() for turn in rollout.turns]
    assert max(segments) > 1


def test_divided_rollouts_are_sampled_in_requests_that_give_way(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="divided", scheduling__chunk_tokens=4, admission__cap=6)
    assert max(grant.max_tokens or 0 for grant in run.of(do.GrantTurn)) <= 4
    assert {start.rollout.member for start in run.of(do.StartRollout)[:4]} == {0}  # probes come first
    assert max(turn.segments for rollout in run.ended.values() for turn in rollout.turns) > 2
    assert set(run.late) <= {0, 1}


def test_unbiased_tail_goes_on_with_the_tokens_that_a_response_had(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        scheduling__type="unbiased_tail",
        scheduling__cutoff_tokens=8,
        scheduling__late="resume",
        algorithm__name="rloo",
    )
    # Nothing is sampled twice: what was put off goes on, and its first tokens are of the weights before.
    assert run.places("deferred") == 0
    mixed = [s for c in run.of(do.ShipBatch) for s in c.batch.samples if len(s.versions) > 1]
    assert mixed
    assert 0 < max(run.late) <= 32


def test_tail_rounds_race_and_run_what_lost_in_a_round_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="tail_rounds")
    puts = {put.number for put in run.of(do.PutOff)}
    back = {start.put_off for start in run.of(do.StartRollout) if start.put_off}
    assert back
    assert back <= puts
    assert set(run.late) == {0}


def test_kv_area_samples_in_requests_of_a_chunk(tmp_path: Path) -> None:
    run = Run(tmp_path, scheduling__type="kv_area", scheduling__chunk_tokens=4, admission__cap=6)
    assert max(grant.max_tokens or 0 for grant in run.of(do.GrantTurn)) <= 4
    assert max(turn.segments for rollout in run.ended.values() for turn in rollout.turns) > 2
    assert run.of(do.NoteLengths)
    assert set(run.late) <= {0, 1}
