"""An engine's process that stands still, for a while or for good: the run waits for it, or has another one started."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from e2e_kit import ACKS, CommandLine, records, steps_in

from paceline.domain import events as on
from paceline.domain.commands import ContinueRollout, StartRollout

pytestmark = [pytest.mark.torch, pytest.mark.demo, pytest.mark.timeout(900)]

STANDS_STILL_S = 2.0
LOAD_S = 20.0
"""An update of weights that takes longer is given up: far more than it takes, and than the engine stands still."""


def test_an_engine_that_is_slow_is_kept_and_one_that_hangs_is_started_again_with_nothing_lost(
    tmp_path: Path,
) -> None:
    run = CommandLine(tmp_path, run__max_steps=1000, engine__load_s=LOAD_S)

    def trained() -> int:
        return max(steps_in(run.run_dir / ACKS), default=0)

    def goes_on(steps: int) -> None:
        upto = trained() + steps
        run.when(lambda: trained() >= upto, within_s=300)

    goes_on(2)
    engine = run.child("paceline.engines.embedded")
    engine.suspend()
    time.sleep(STANDS_STILL_S)
    engine.resume()
    goes_on(3)
    assert run.child("paceline.engines.embedded").pid == engine.pid, "it was only slow"
    engine.suspend()  # for good
    run.when(lambda: not engine.is_running(), within_s=300)
    goes_on(4)
    run.process.terminate()
    assert run.end(within_s=60) in (0, 130), run.said
    assert run.summary["tokens_conserved"]

    told = records(run.run_dir)
    lost = [r.event for r in told if isinstance(r.event, on.EngineLost)]
    assert len(lost) <= 1
    assert sum(isinstance(r.event, on.EngineJoined) for r in told) == 2
    started = Counter(
        c.rollout for r in told for c in r.commands if isinstance(c, StartRollout | ContinueRollout)
    )
    ended = Counter(r.event.rollout.id for r in told if isinstance(r.event, on.RolloutEnded))
    assert max(started.values()) == 1
    assert ended == started
