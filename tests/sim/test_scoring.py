"""Rollouts that wait to be scored, in a simulation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pydantic import ValidationError
from sim_kit import Kept, simulation

from paceline.core.admission import FixedCap
from paceline.core.scheduling import Overprovision
from paceline.domain.commands import StartRollout
from paceline.domain.events import RolloutEnded
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.sim.cells import run_cell
from paceline.sim.plan import RolloutPlan
from paceline.sim.scoring import Scored, ScoringModel
from paceline.sim.study import StudyConfig
from paceline.testing.simulated import Checked

STUDY = {
    "study": {"seeds": 1, "steps": 6},
    "engines": {"count": 2, "kv_tokens": 60_000, "max_model_len": 40_000},
    "batch": {"rollouts": 16, "seq_len": 40_000},
    "workload": [{"name": "one", "env": [{"name": "env", "preset": "code-single", "group_size": 4}]}],
    "policy": [{"name": "synchronous", "scheduling": {"type": "synchronous"}}],
}


class AllAlike:
    """Answers of one length, which end in the same step where they began in the same."""

    longest = 2000

    def __init__(self, score_s: float = 5.0) -> None:
        self.score_s = score_s

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        return RolloutPlan(
            prompt=64, turns=((0.0, 0, 100),), score_s=self.score_s, reward=float(command.rollout.member % 2)
        )


def waits(kept: Kept) -> list[float]:
    """Seconds from a rollout's last token to its end, of those that ended by themselves, in the order of their ends."""
    ended = [event.rollout for _, event, _ in kept.entries if isinstance(event, RolloutEnded)]
    return [r.ended - r.turns[-1].ended for r in ended if r.outcome.ending == "completed"]


def test_those_that_end_together_are_scored_as_many_at_once_as_there_are_places() -> None:
    kept = Kept()
    run = simulation(
        workload=AllAlike(), engines=1, admission=FixedCap(8), batch=8, lag=0, max_steps=1, scored_at_once=3,
        folds=[kept],
    )  # fmt: skip
    run.run()
    assert waits(kept)[:8] == pytest.approx([5, 5, 5, 10, 10, 10, 15, 15], abs=0.5)


def test_without_a_number_of_places_nobody_waits() -> None:
    kept = Kept()
    simulation(
        workload=AllAlike(), engines=1, admission=FixedCap(8), batch=8, max_steps=2, folds=[kept]
    ).run()
    assert waits(kept) == pytest.approx([5.0] * len(waits(kept)))


def test_they_are_scored_in_the_order_in_which_they_came() -> None:
    kept = Kept()
    simulation(max_steps=3, scored_at_once=1, workload=AllAlike(3.0), folds=[kept]).run()
    ended = [e.rollout for _, e, _ in kept.entries if isinstance(e, RolloutEnded)]
    scored = [r for r in ended if r.outcome.ending == "completed"]
    assert len(scored) >= 48
    assert [r.turns[-1].ended for r in scored] == sorted(r.turns[-1].ended for r in scored)
    apart = [b.ended - a.ended for a, b in pairwise(scored)]
    assert min(apart) >= 3.0 - 1e-9


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_place_of_one_that_is_cancelled_is_free_again(at_once: int) -> None:
    """Of those that race, losers are cancelled in the line and while they are scored: a place that stayed taken would end the
    run at its first steps."""
    kept = Kept()
    run = simulation(
        admission=FixedCap(24), scheduling=Overprovision(1.5, "discard"), lag=0, max_staleness=0, max_steps=12,
        scored_at_once=at_once, workload=AllAlike(2.0), watch=Checked(), folds=[kept],
    )  # fmt: skip
    run.run()
    assert run.trained == 12
    ended = [e.rollout for _, e, _ in kept.entries if isinstance(e, RolloutEnded)]
    in_vain = [r for r in ended if r.outcome.ending == "cancelled" and sampled(r) == 100]
    assert len(in_vain) > 10
    ends = [r.ended for r in ended if r.outcome.ending == "completed"]
    # Each takes 2 s of one place, so of one more than there are places the last ends 2 s after the first.
    apart = [b - a for a, b in zip(ends, ends[at_once:], strict=False)]
    assert min(apart) == pytest.approx(2.0)


def sampled(rollout: Rollout) -> int:
    return sum(len(turn.sampled_ids) for turn in rollout.turns)


def test_how_long_it_takes_is_the_rollouts_whatever_the_policy() -> None:
    scoring = ScoringModel(median_s=4.0, sigma=1.0, timeout_s=20.0)
    plans = [
        Scored(AllAlike(), scoring, 3).plan(started(noise), now).score_s
        for now in (0.0, 100.0)
        for noise in range(2000)
    ]
    assert plans[:2000] == plans[2000:]
    found = sorted(plans[:2000])
    assert found[1000] == pytest.approx(4.0, rel=0.1)
    assert found[-1] == 20.0
    assert found.count(20.0) == pytest.approx(2000 * 0.0538, rel=0.3)  # a normal number is beyond ln 5
    assert Scored(AllAlike(), ScoringModel(timeout_s=3.0), 3).plan(started(1), 0.0).score_s == 3.0
    assert Scored(AllAlike(), ScoringModel(at_once=2), 3).plan(started(1), 0.0).score_s == 5.0


def started(noise: int) -> StartRollout:
    return StartRollout(RolloutId(0, 0, 0), TaskRef("env", "train", 0, 0), 0, noise, "", 0)


def test_a_study_says_what_a_line_costs_and_one_that_is_wide_enough_costs_nothing() -> None:
    def step_s(**scoring: object) -> float:
        study = StudyConfig.model_validate(STUDY)
        env = study.workload[0].env[0].model_copy(update={"scoring": ScoringModel.model_validate(scoring)})
        workload = study.workload[0].model_copy(update={"env": (env,)})
        return run_cell(study, study.policy[0], workload, 1).numbers["step_s"]

    free = step_s(median_s=10.0)
    assert step_s(median_s=10.0, at_once=16) == free
    # 16 rollouts by two are 80 s, of which the first answers' share goes on beside the last ones.
    assert free + 20 < step_s(median_s=10.0, at_once=2) < free + 80


def test_a_spread_without_a_median_is_refused() -> None:
    with pytest.raises(ValidationError, match="sigma is 1, and there is no median_s"):
        ScoringModel(sigma=1.0)
