"""The baselines and the yardstick of the rows of S5 and S6 (`bench/caps.py`)."""

from __future__ import annotations

import msgspec
import pytest

from paceline.domain.load import EngineLoad

pytestmark = pytest.mark.usefixtures("benches")

LOAD = EngineLoad(running=0, waiting=0, kv_usage=0.5, preemptions=0, generated_tokens=0)


def load(usage: float, asked: int, hits: int) -> EngineLoad:
    return msgspec.structs.replace(LOAD, kv_usage=usage, prefix_queries=asked, prefix_hits=hits)


def test_concur_adds_when_the_cache_is_light_and_halves_when_it_is_full_and_misses() -> None:
    from bench._concur import ConcurCap

    rule = ConcurCap(10)
    caps = []
    for seen in (
        load(0.1, 0, 0),  # the first reading has nothing to compare with
        load(0.1, 100, 50),
        load(0.4, 200, 60),
        load(0.6, 300, 150),
        load(0.6, 400, 160),
        None,
        load(0.6, 500, 170),
    ):
        rule.observe(None, seen, 0.0)  # type: ignore[arg-type]
        caps.append(rule.cap("e0"))
    assert caps == [10, 12, 12, 12, 6, 6, 6]
    assert rule.room("e0", 4) == 2


def test_a_scheduled_cap_holds_for_its_stretch() -> None:
    from bench._clairvoyant import ScheduledCap

    rule = ScheduledCap((20, 10, 5), 100.0)
    seen = []
    for now in (0.0, 99.0, 100.0, 250.0, 1000.0):
        rule.observe(None, None, now)  # type: ignore[arg-type]
        seen.append(rule.cap("e0"))
    assert seen == [20, 20, 10, 5, 5]


def test_a_rule_is_measured_on_the_agents_it_is_said_to_be_measured_on() -> None:
    from bench import caps

    few, many, drift = (
        caps.measure(caps.Job(1, rule, turns=4.0, turns_at_end=end, seconds=1200.0))
        for rule, end in ((2, None), (8, None), ((8, 2), 8.0))
    )
    assert 1.5 * few.goodput < many.goodput
    assert few.goodput < drift.goodput < many.goodput
    assert few.wasted == many.wasted == 0.0
    table = caps.Table("x", caps._ratios({"a": [few]}, [many]), {"a": [few]}, [many])
    assert table.ratios["a"] == [few.goodput / many.goodput]


def test_predictive_does_not_take_new_weights_for_a_cache_that_is_too_small() -> None:
    from bench import caps

    # Agents of ten turns, and new weights every half minute: most rollouts lose their cached context once or twice.
    best, ours = (
        caps.measure(caps.Job(1, rule, turns=10.0, seconds=3600.0)).goodput for rule in (40, "predictive")
    )
    assert ours > 0.95 * best
