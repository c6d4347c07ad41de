"""Logprobs that sampled tokens cannot have fail their rollouts, and are an alert when they are more than a few."""

from __future__ import annotations

import pytest
from test_runner import END, Script, World, one_call, outcome, reply

from paceline.errors import ImpossibleLogprobs
from paceline.runtime.impossible import WINDOW, ImpossibleWatch


def wrong(bad: int, tokens: int) -> ImpossibleLogprobs:
    return ImpossibleLogprobs("logprob nan at position 3 of 9", bad=bad, tokens=tokens)


def test_s89_an_alert_fires_once_more_than_one_token_in_a_hundred_is_impossible() -> None:
    told: list[str] = []
    watch = ImpossibleWatch(told.append)
    watch.sampled("e0", 990)
    watch.refused("e0", wrong(10, 10))
    assert not told, "one in a hundred is not more than that"
    watch.refused("e1", wrong(1, 50))
    assert len(told) == 1, "each engine for itself"
    watch.refused("e0", wrong(1, 10))
    assert len(told) == 2
    assert "11 of about 1010 tokens of engine e0" in told[1]
    assert "logprob nan at position 3 of 9" in told[1]
    watch.refused("e0", wrong(5, 10))
    assert len(told) == 2, "once, and not at every reply"
    for _ in range(20):
        watch.sampled("e0", WINDOW // 4)
    watch.refused("e0", wrong(5000, 5000))
    assert len(told) == 3, "anew when it had been better"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.3, -9999.0])
def test_s89_a_run_is_told_of_an_engine_whose_logprobs_cannot_be_any(value: float) -> None:
    world = World(one_call, Script(reply([5, 6, END], logprobs=[-0.5, value, -0.1]), "ok"))
    told: list[str] = []
    world.runner.on_note = told.append
    assert outcome(world.run()) == ("failed", "engine")
    assert outcome(world.run()) == ("completed", None), "the others go on"
    assert len(told) == 1
    assert "1 of about 3 tokens of engine e0" in told[0]
    assert "sampled token 1 (id 6)" in told[0]
