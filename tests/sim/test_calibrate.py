"""A journal tells what the engine behind it costs."""

from __future__ import annotations

import pytest
from sim_kit import Kept, simulation

from paceline.core.admission import FixedCap
from paceline.errors import ConfigError
from paceline.sim.calibrate import calibrate
from paceline.sim.engine import Speed


def test_a_simulated_run_gives_its_engines_constants_back() -> None:
    speed = Speed(kv_tokens=400_000, max_model_len=40_000, kv_s=3e-7)
    kept = Kept()
    simulation(
        "search", engines=1, speed=speed, admission=FixedCap(24), batch=64, max_steps=3, folds=[kept]
    ).run()
    found = calibrate(kept.entries)
    assert found.requests > 500
    assert found.error < 0.2
    assert abs(found.total_error) < 0.05
    step = found.fixed_s + 12 * found.seq_s + 12 * 5000 * found.token_s
    assert step == pytest.approx(speed.decode_s(12) + 12 * 5000 * speed.kv_s, rel=0.25)


def test_a_journal_with_too_little_in_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 0 whole engine requests"):
        calibrate([])
