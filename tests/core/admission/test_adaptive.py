"""The published controller's state table, one row a test."""

from __future__ import annotations

import pytest
from admission_kit import Held, flight, load

from paceline.core.admission import AdaptiveCap, Bounds
from paceline.domain.load import EngineInfo


class Driven:
    """A controller of one engine, polled every 5 s."""

    def __init__(self, start: int | None = 40, active: int | None = None, **bounds: int) -> None:
        self.admission = AdaptiveCap(Bounds(initial=start, **bounds))
        self.admission.joined(EngineInfo("e0", None, None))
        self.held = Held(active if active is not None else start or 0)
        self.now = 0.0

    def poll(self, usage: float = 0.0, *, times: int = 1, **what: int) -> int:
        """Readings in a row; returns how many are to be shed after the last."""
        for _ in range(times):
            self.admission.observe(self.held, load(usage, **what), self.now)
            self.now += 5.0
        return self.admission.to_park("e0", self.held.active)

    def complete(self, tokens: int = 100, *, after: float = 0.0) -> None:
        """One rollout ends and another takes its place."""
        self.held.active -= 1
        self.admission.ended(self.held, flight(tokens), self.now - 5.0 + after)
        self.held.active += 1

    @property
    def limit(self) -> float:
        return self.admission["e0"].limit

    @property
    def cap(self) -> int:
        return self.admission.cap("e0")


def test_it_starts_with_capacity_over_the_longest_context() -> None:
    admission = AdaptiveCap()
    admission.joined(EngineInfo("e0", 131_072, 16_384))
    assert admission.cap("e0") == 8


def test_without_a_known_capacity_it_starts_with_the_least() -> None:
    assert Driven(start=None).cap == 1
    assert Driven(start=None, floor=4).cap == 4


def test_the_longest_context_of_the_config_stands_in_for_an_engine_that_does_not_say_its_own() -> None:
    admission = AdaptiveCap(Bounds(longest=1000))
    admission.joined(EngineInfo("e0", 10_000, None))
    assert admission.cap("e0") == 10


def test_a_full_turnover_below_60_percent_grows_it_by_a_quarter() -> None:
    run = Driven(start=40, most=1000)
    run.poll(0.5)
    for _ in range(40):
        run.complete()
        run.held.active = run.cap
    assert 1.2 * 40 < run.limit < 1.3 * 40


@pytest.mark.parametrize(
    ("usage", "what"),
    [(0.61, {}), (0.5, {"waiting": 1})],
    ids=["usage above 60%", "anything queued"],
)
def test_it_does_not_grow_with(usage: float, what: dict[str, int]) -> None:
    run = Driven()
    run.poll(usage, **what)
    run.complete()
    assert run.limit == 40


def test_it_does_not_grow_for_a_rollout_without_tokens_nor_when_the_cap_does_not_bind() -> None:
    run = Driven()
    run.poll(0.5)
    run.complete(tokens=0)
    assert run.limit == 40
    run.held.active = 30
    run.complete()
    assert run.limit == 40


def test_permission_to_grow_expires_15_s_after_the_poll() -> None:
    run = Driven()
    run.poll(0.5)
    run.complete(after=15.1)
    assert run.limit == 40
    run.complete(after=14.9)
    assert run.limit > 40


def test_above_80_percent_it_is_trimmed_to_70_and_nobody_is_shed() -> None:
    run = Driven()
    assert run.poll(0.84) == 0
    assert run.limit == pytest.approx(40 * 0.7 / 0.84)


def test_above_90_percent_the_excess_is_shed() -> None:
    run = Driven()
    assert run.poll(0.95) == 40 - int(40 * 0.7 / 0.95)


def test_it_is_trimmed_again_only_after_six_polls() -> None:
    run = Driven()
    run.poll(0.84)
    once = run.limit
    run.poll(0.84, times=5)
    assert run.limit == once
    run.held.active = run.cap
    run.poll(0.84)
    assert run.limit < once


def test_a_trim_never_raises_the_cap() -> None:
    run = Driven(start=10, active=40)
    run.poll(0.84)
    assert run.limit == 10


def test_a_preemption_cuts_to_80_percent_of_what_runs_and_sheds_the_rest() -> None:
    run = Driven()
    run.poll(0.5)
    assert run.poll(0.5, preemptions=3) == 8
    assert run.limit == 32


def test_a_queue_over_half_of_what_runs_cuts_to_90_percent_at_the_sixth_poll() -> None:
    run = Driven()
    assert run.poll(0.5, times=5, running=10, waiting=6) == 0
    assert run.limit == 40
    assert run.poll(0.5, running=10, waiting=6) == 4
    assert run.limit == 36


def test_a_queue_that_breaks_off_starts_to_count_anew() -> None:
    run = Driven()
    run.poll(0.5, times=5, running=10, waiting=6)
    run.poll(0.5)
    run.poll(0.5, times=5, running=10, waiting=6)
    assert run.limit == 40


def test_while_draining_nothing_is_cut_again_and_nothing_grows() -> None:
    run = Driven()
    run.poll(0.5)
    run.poll(0.5, preemptions=1)
    assert run.poll(0.95, preemptions=9) == 0
    assert run.limit == 32
    run.complete()
    assert run.limit == 32


def test_a_second_sign_within_six_polls_of_the_drain_halves() -> None:
    run = Driven()
    run.poll(0.5)
    run.poll(0.5, preemptions=1)
    run.held.active = 32
    run.poll(0.5, times=3, preemptions=1)
    assert run.poll(0.5, preemptions=2) == 16
    assert run.limit == 16


def test_after_the_grace_a_sign_cuts_to_80_percent_again() -> None:
    run = Driven()
    run.poll(0.5)
    run.poll(0.5, preemptions=1)
    run.held.active = 32
    run.poll(0.5, times=8, preemptions=1)
    run.held.active = 32
    run.poll(0.5, preemptions=2)
    assert run.limit == pytest.approx(0.8 * 32)


def test_a_counter_that_begins_anew_is_not_a_burst_of_preemptions() -> None:
    run = Driven()
    run.poll(0.5, preemptions=500)
    run.poll(0.5, preemptions=0)
    run.poll(0.5, preemptions=0)
    assert run.limit == 40


def test_readings_that_come_more_often_are_gathered_to_polls_of_5_s() -> None:
    admission = AdaptiveCap(Bounds(initial=40))
    held = Held(40)
    for second in range(6):
        admission.observe(held, load(0.5, running=10, waiting=6), float(second))
    assert admission["e0"].queue_polls == 2
    admission.observe(held, load(0.5, preemptions=0), 6.0)
    admission.observe(held, load(0.5, preemptions=2), 7.0)
    admission.observe(held, load(0.5, preemptions=2), 10.0)
    assert admission.cap("e0") == 32


def test_a_reading_that_did_not_come_takes_back_the_permission_to_grow_and_cuts_nothing() -> None:
    run = Driven()
    run.poll(0.5)
    run.admission.observe(run.held, None, run.now)
    run.complete()
    assert run.limit == 40


def test_an_engine_that_never_answers_is_run_by_latency_and_says_so() -> None:
    run = Driven(start=None, active=1)
    for _ in range(3):
        run.admission.observe(run.held, None, run.now)
        run.now += 5.0
    assert "no metrics" in run.admission.reason("e0")
    for _ in range(200):
        run.held.active = run.cap
        run.admission.segment_ended(run.held, flight(), 100, 0, 1.0, None, run.now)
    grown = run.cap
    assert grown > 4
    for _ in range(2 * grown):
        run.admission.segment_ended(run.held, flight(), 0, 0, 0.1, "answered 429", run.now, is_busy=True)
    assert run.cap < grown
    assert "429" in run.admission.reason("e0")


def test_an_address_with_429_in_it_is_no_refusal() -> None:
    run = Driven(start=None, active=1)
    for _ in range(3):
        run.admission.observe(run.held, None, run.now)
        run.now += 5.0
    cap = run.cap
    for _ in range(20):
        error = "engine e0 (http://gpu:4290): answered 400: no such adapter"
        run.admission.segment_ended(run.held, flight(), 0, 0, 0.1, error, run.now)
    assert run.cap == cap


def test_at_most_a_group_or_a_tenth_more_start_in_5_s_and_one_that_ends_makes_room() -> None:
    run = Driven(start=100, active=50, group=4)
    run.poll(0.5)
    assert run.admission.room("e0", 50) == 10
    for _ in range(10):
        run.admission.started(run.held, flight(), run.now)
    assert run.admission.room("e0", 60) == 0
    run.admission.ended(run.held, flight(), run.now)
    assert run.admission.room("e0", 59) == 1
    cancelled = flight()
    cancelled.cancelled = "overload"
    run.admission.ended(run.held, cancelled, run.now)
    assert run.admission.room("e0", 58) == 1
    run.poll(0.5, times=2)
    assert run.admission.room("e0", 58) == 10


def test_engines_are_judged_one_by_one() -> None:
    admission = AdaptiveCap(Bounds(initial=40))
    hot, cool = Held(40), Held(40)
    hot.id, cool.id = "hot", "cool"
    admission.observe(hot, load(0.95), 0.0)
    admission.observe(cool, load(0.3), 0.0)
    admission.ended(cool, flight(), 1.0)
    assert admission.cap("hot") < 40 <= admission.cap("cool")


def test_its_cap_survives_a_restart() -> None:
    run = Driven()
    run.poll(0.84)
    again = AdaptiveCap()
    again.restore(run.admission.snapshot())
    again.joined(EngineInfo("e0", 131_072, 16_384))
    assert again.cap("e0") == run.cap
