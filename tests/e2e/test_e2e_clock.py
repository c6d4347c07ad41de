"""A real run whose wall clock jumps by hours, in each of its processes, over a kill."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import e2e_kit
import pytest
from e2e_kit import CommandLine, records

from paceline.cli.main import main
from paceline.domain import commands as do
from paceline.domain import events as on

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

JUMPING = Path(__file__).parent / "jumping"
PER_S = 4.0
BURST = 4
"""Starts that the rate allows at once: one second's worth."""
PACED: dict[str, Any] = {
    "run__max_steps": 4,
    "env__0__tasks_per_minute": 60.0 * PER_S,
    "env__0__limits__deadline_s": 120.0,
    "run__outage_s": 60.0,
    "trainer__step_s": 120.0,
}


def test_a_clock_that_jumps_by_hours_ends_no_run_and_breaks_no_deadline_pace_order_or_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = dict(e2e_kit._ENVIRONMENT)
    changed["PYTHONPATH"] = os.pathsep.join([str(JUMPING), changed["PYTHONPATH"]])
    monkeypatch.setattr(e2e_kit, "_ENVIRONMENT", changed)
    run = CommandLine(tmp_path, **PACED)
    run.when(lambda: bool(e2e_kit.steps_in(run.run_dir / e2e_kit.ACKS)[-1:] >= [1]), within_s=300)
    run.process.kill()
    run.process.wait()
    again = CommandLine(tmp_path, "--resume", str(tmp_path / "t"), **PACED)
    assert again.end(within_s=400) == 0, again.said
    assert again.status.status == "done"
    assert again.summary["tokens_conserved"]

    told = records(again.run_dir)
    lives = [n for n, r in enumerate(told) if isinstance(r.event, on.RunOpened)]
    assert len(lives) == 2
    assert all(before.at <= after.at for before, after in pairwise(told)), "the run's clock never goes back"
    assert max(after.at - before.at for before, after in pairwise(told)) < 1800.0, "nor does it jump by hours"
    endings = [r.event.rollout.outcome for r in told if isinstance(r.event, on.RolloutEnded)]
    assert not [o for o in endings if o.cause == "deadline"]
    steps = [c.batch.step for r in told for c in r.commands if isinstance(c, do.ShipBatch)]
    assert steps == [1, 2, 3, 4]
    for begin, end in ((0, lives[1]), (lives[1], len(told))):
        starts = [
            r.at
            for r in told[begin:end]
            for c in r.commands
            if isinstance(c, do.StartRollout | do.ContinueRollout) and c.task.split == "train" and c.engine
        ]
        assert len(starts) > 2 * BURST
        for first, at in enumerate(starts):
            for count, later in enumerate(starts[first:], 1):
                assert count <= PER_S * (later - at) + BURST + 1e-3, "no faster than tasks_per_minute"
    assert main(["replay", str(again.run_dir)]) == 0
