"""What each request of a journal met on its engine, computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.commands import Command
from paceline.domain.ids import RolloutId
from paceline.sim.requests import Record, Stretch, engine_time

A, B, C = (RolloutId(0, member) for member in range(3))
ALONE = Stretch(
    seconds=2.0,
    steps=10.0,
    sequences=10.0,
    context=10 * 0.9 * 105,
    padded=10 * 0.9 * 105,
    again=0.0,
    prefilled=80.0,
    attended=80.0 * 60,
    came=1.0,
)
"""Of ten tokens in two seconds, sampled to a prompt of 100 with 20 of them cached. The step that samples the first token reads the
context with the prefill; half-way it has 105 tokens, and a token of the prefill has 20 to 100 before it."""


def opened() -> Record:
    return 0.0, on.RunOpened("run", 0), ()


def asked(at: float, rollout: RolloutId, context: int = 100, version: int = 0) -> Record:
    """And granted at once."""
    return at, on.TurnRequested(rollout, context, 1000), (do.GrantTurn(rollout, "e0", version),)


def ended(at: float, rollout: RolloutId, sampled: int = 10, cached: int = 20) -> Record:
    return at, on.SegmentEnded(rollout, "e0", ((0, sampled),) if sampled else (), "stop", cached), ()


def loads(at: float, *more: Command) -> Record:
    return at, on.PolicyPublished(1, "v1"), (do.UpdateWeights("e0", 1, "v1"), *more)


def loaded(at: float) -> Record:
    return at, on.WeightsLoaded("e0", 1, 1.0), ()


def found(*records: Record, most: int = 8192) -> tuple[list[Stretch], list[Stretch]]:
    seen = engine_time(records, most)
    return seen.requests, seen.stretches


def same(stretch: Stretch) -> Stretch:
    """Up to what adding up rounds."""
    values: list[Any] = [pytest.approx(value) for value in msgspec.structs.astuple(stretch)]
    return Stretch(*values)


def test_a_request_that_runs_alone_sees_a_step_a_token() -> None:
    assert found(opened(), asked(1.0, A), ended(3.0, A)) == ([same(ALONE)], [same(ALONE)])


def test_a_request_that_comes_at_any_moment_waits_for_half_a_step() -> None:
    """B sees 20.5 steps in its two seconds and A 20; they share them."""
    requests, stretches = found(
        opened(), asked(0.0, A), asked(4.0, B), ended(6.0, B, sampled=20), ended(10.0, A, sampled=100)
    )
    together = 2 * (10 + 10.25) / 2
    of_a, of_b = 0.99 * (100 + 10 * 5), 19 / 20.5 * (100 + 10 * 1)
    assert [request.steps for request in requests] == pytest.approx([together, 40 + together + 40])
    assert requests[0].sequences == pytest.approx(together * (1 + 20 / 20.5))
    assert requests[0].context == pytest.approx(together * (of_a + of_b))
    # Each as much as A has, in the 0.05 s before B enters and in those behind.
    a_has = (0.05 * (100 + 40.25) + 1.95 * (100 + 50.25)) / 2
    assert requests[0].padded == pytest.approx(together * (0.99 + 19 / 20.5) * a_has)
    assert (requests[0].prefilled, requests[0].came) == (80.0, 1.0)
    # No time of the engine is in two stretches, and none is missing.
    assert [stretch.seconds for stretch in stretches] == [6.0, 4.0]
    assert [stretch.steps for stretch in stretches] == pytest.approx([40 + together, 40])
    assert [stretch.came for stretch in stretches] == [2.0, 0.0]


def test_a_request_that_comes_when_an_answer_goes_out_waits_for_a_whole_step() -> None:
    requests, _ = found(
        opened(),
        asked(0.0, A),
        asked(0.0, B),
        ended(2.0, B, sampled=20),
        asked(2.0, C),
        ended(4.0, C, sampled=20),
        ended(10.0, A, sampled=100),
    )
    _, of_c, _ = requests
    assert of_c.steps == pytest.approx(2 * (10 + 10.5) / 2)
    assert of_c.sequences == pytest.approx(of_c.steps * (1 + 20 / 21))


def test_a_long_prompt_takes_steps_that_sample_nothing() -> None:
    """A prompt of 1,000 tokens by 300: three steps before the one that samples, so that 7 tokens see 10 steps."""
    (request,), _ = found(opened(), asked(1.0, A, context=1000), ended(3.0, A, sampled=7, cached=0), most=300)
    assert request == same(
        Stretch(2.0, 10.0, 7.0, 10 * 0.6 * 1003.5, 10 * 0.6 * 1003.5, 0.0, 1000.0, 1000.0 * 500, 1.0)
    )


def test_time_in_which_weights_load_is_none_of_a_request() -> None:
    requests, stretches = found(opened(), asked(1.0, A), loads(2.0), loaded(7.0), ended(8.0, A))
    assert (requests, stretches) == ([same(ALONE)], [same(ALONE)])


@pytest.mark.parametrize("sampled", [0, 3])
def test_a_request_of_which_all_time_is_that_of_a_load_is_left_out(sampled: int) -> None:
    """It is given up, or answered by an engine that was taken out while it loads and has joined again."""
    grant = do.GrantTurn(B, "e0", 0)
    within = [loads(2.0, grant), ended(3.0, B, sampled), loaded(4.0)]
    assert found(opened(), *within) == ([], [])
    requests, stretches = found(opened(), *within, asked(5.0, A), ended(7.0, A))
    assert (requests, stretches) == ([same(ALONE)], [same(ALONE)])


def test_what_siblings_share_is_read_again_where_one_of_them_found_it() -> None:
    """Of one group, version and engine; what a later turn finds is its own conversation."""
    other = RolloutId(1, 0)
    before = [
        opened(),
        asked(1.0, A),
        asked(1.0, other),
        ended(3.0, A, cached=0),
        ended(3.0, other, cached=20),
    ]
    both = [asked(4.0, A, context=150), asked(4.0, B), ended(6.0, A, cached=110), ended(6.0, B, cached=96)]
    (first, *_, last), _ = found(*before, *both)
    assert first.again == 0.0
    assert last.again == pytest.approx(10 * 0.9 * 96, rel=0.1)
    # New weights: what they share is known, but those of two versions have nothing in common.
    later = [asked(7.0, A, version=1), asked(7.0, B, version=1), ended(9.0, A), ended(9.0, B)]
    (*_, last), _ = found(*before, *both, *later)
    assert last.again == pytest.approx(10 * 0.9 * 96, rel=0.1)
    (*_, last), _ = found(*before, *both, later[0], asked(7.0, B, version=2), *later[2:])
    assert last.again == 0.0


def test_what_a_rollout_of_an_earlier_life_finds_is_its_own_conversation() -> None:
    goes_on = (0.5, on.RolloutContinued(A, 500, turns=4), ())
    (request, *_), _ = found(
        opened(),
        goes_on,
        asked(1.0, A, context=900),
        asked(1.0, B),
        ended(3.0, A, cached=890),
        ended(3.0, B, cached=0),
    )
    assert request.again == 0.0


def test_what_a_life_leaves_under_way_is_none_of_the_next() -> None:
    """B runs beside A until the life ends, with no more prompt than is known; the clock of the next life begins anew."""
    requests, stretches = found(
        opened(), asked(1.0, A), asked(1.0, B), ended(3.0, A), opened(), asked(1.0, A), ended(3.0, A)
    )
    both = 10 * (0.9 * 105 + 105)
    shared = Stretch(2.0, 10.0, 20.0, both, both, 10 * 20, 80.0, 80.0 * 60, 2.0)
    assert (requests, stretches) == ([same(shared), same(ALONE)],) * 2
