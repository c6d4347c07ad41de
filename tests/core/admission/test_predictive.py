"""The predictive controller: what it learns, what its model says, and how it does in a closed loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from admission_kit import Held, flight, load

from paceline.core.admission import Bounds, FixedCap, PredictiveCap
from paceline.core.admission.forecast import Forecast, Survival
from paceline.core.admission.learning import EnvStats, Profile, Speed, SpeedFit
from paceline.core.admission.network import solve
from paceline.domain.ids import GroupId, RolloutId
from paceline.domain.load import EngineInfo
from paceline.testing.closed_loop import ClosedLoop, swe_small
from paceline.testing.engine_model import EngineModel, EngineSpeed

SPEED = Speed(fixed=6.4e-3, seq=0.0, token=73e-9, prefill=45e-6)


def profile(**changes: object) -> Profile:
    """About the small software-engineering agents."""
    made = Profile(
        turns=23.4,
        first=2500.0,
        final=22_300.0,
        context=13_800.0,
        sd=8_200.0,
        sampled=235.0,
        sampled_sq=150_000.0,
        observed=576.0,
        outside_s=4.1,
        waits=np.sort(np.random.default_rng(0).lognormal(1.0, 1.0, 500)),
    )
    return msgspec.structs.replace(made, **changes)


def test_rollouts_in_flight_do_not_bias_the_number_of_turns() -> None:
    # Every rollout has 10 turns; half are still at turn 6: an average over the ended would be right by luck, an
    # average over all of them wrong.
    env = EnvStats()
    for number in range(200):
        turns = 10 if number % 2 else 6
        for turn in range(turns):
            env.asked(turn, 100 * (turn + 1), 50, 1.0)
            env.sampled(50, whole=True)
        if turns == 10:
            env.finished(10, 100, 1000, 10.0, 0.0)
    seen = env.profile(longest=4000.0, now=0.0)
    assert seen.turns == pytest.approx(10, rel=0.12)
    assert seen.context == pytest.approx(550, rel=0.15)


@pytest.mark.parametrize(("elapsed_s", "left_out"), [(6.0, 0.6), (12.0, 0.85)])
def test_tool_waits_under_way_count_as_long_as_they_have_lasted(elapsed_s: float, left_out: float) -> None:
    # Tools that take 10 s on the mean, asked at moments spread over the first seconds of a run.
    env, random = EnvStats(), np.random.default_rng(3)
    for number in range(900):
        began, lasts = random.uniform(0.0, elapsed_s), random.exponential(10.0)
        env.asked(0, 100, 0, 0.0)
        if began + lasts < elapsed_s:
            env.asked(1, 200, 50, lasts)
        else:
            env.waiting[RolloutId(GroupId(number), 0)] = began
    seen = env.profile(longest=4000.0, now=elapsed_s)
    begun = env.waiting
    env.waiting = {}
    ended = env.profile(longest=4000.0, now=elapsed_s)
    assert ended.waits.mean() < left_out * seen.waits.mean()
    # The chance to have come back within a time that has been seen is right: 1 - exp(-t / 10).
    for seconds in (1.0, 2.0, 4.0):
        share = np.searchsorted(seen.waits, seconds) / len(seen.waits)
        assert share == pytest.approx(1.0 - np.exp(-seconds / 10.0), abs=0.05)
    assert seen.outside_s > ended.outside_s
    assert len(begun) > 100


def test_before_anybody_has_ended_rollouts_are_expected_to_go_on_to_the_longest_context() -> None:
    env = EnvStats()
    for turn in range(4):
        for _ in range(10):
            env.asked(turn, 1000 * (turn + 1), 500, 1.0)
            env.sampled(500, whole=True)
    seen = env.profile(longest=32_000.0, now=0.0)
    assert 8_000 < seen.context < 18_000


def test_it_tells_the_parts_of_a_step_and_the_price_of_a_prompt_token_apart() -> None:
    fit, random = SpeedFit(), np.random.default_rng(1)
    for _ in range(60):
        for _ in range(10):
            steps, batch = random.integers(20, 800), random.uniform(1, 40)
            tokens, missed = batch * random.uniform(5e3, 2e4), random.uniform(0, 3e4)
            seconds = steps * (6e-3 + 1e-4 * batch + 8e-8 * tokens) + 4e-5 * missed
            fit.segment(seconds, steps, batch, tokens, missed)
        fit.window(seconds, steps, batch, tokens, missed)
    found = fit.solve()
    assert found.fixed == pytest.approx(6e-3, rel=0.1)
    assert found.seq == pytest.approx(1e-4, rel=0.4)  # a small part, and the guess is that there is none
    assert found.token == pytest.approx(8e-8, rel=0.1)
    assert found.prefill == pytest.approx(4e-5, rel=0.1)


def test_the_best_number_lies_below_the_cliff_and_rises_with_tool_waits() -> None:
    short = solve(profile(), SPEED, 380_000.0, 512, risk=1.0)
    waits = profile().waits * 6
    long = solve(profile(outside_s=16.0, waits=waits), SPEED, 380_000.0, 512, risk=1.0)
    assert 18 <= short.best <= 27
    assert short.at(short.best) > 1.5 * short.at(2 * short.best)
    assert long.best > 1.2 * short.best


def test_more_risk_averse_is_never_more() -> None:
    best = [solve(profile(), SPEED, 380_000.0, 512, risk=risk).best for risk in (0.0, 1.0, 2.0, 3.0)]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("capacity", [10.0, 300.0, 14_000.0, 1e9])
def test_any_capacity_has_an_answer(capacity: float) -> None:
    for turns in (1.0, 5.0):
        seen = solve(profile(turns=turns, waits=np.array([0.0])), SPEED, capacity, 1024, risk=1.0)
        assert 1 <= seen.best <= 1024
        assert np.isfinite(seen.turns_per_s).all()


def test_survival_counts_those_in_flight_as_lasting_longer() -> None:
    alone = Survival([10.0, 10.0], np.array([]))
    with_others = Survival([10.0, 10.0], np.array([30.0, 30.0]))
    assert alone.beyond(np.array([5.0, 20.0])).tolist() == [1.0, 0.0]
    assert with_others.beyond(np.array([5.0, 20.0])).tolist() == [1.0, 0.5]


def test_the_forecast_holds_starts_back_before_contexts_outgrow_the_bound() -> None:
    lasting = Survival([], np.array([]))
    room = Forecast().room_for(
        np.zeros(10),
        np.full(10, 100.0),
        lasting,
        growth=10.0,
        first=100.0,
        horizon_s=90.0,
        bound=10_000.0,
        now=0.0,
    )
    assert room == pytest.approx(0.0)


def test_until_it_knows_enough_it_holds_what_fits_at_the_longest() -> None:
    admission = PredictiveCap()
    admission.joined(EngineInfo("e0", 131_072, 16_384))
    for n in range(20):
        admission.observe(Held(admission.cap("e0")), load(0.1), 5.0 * n)
    assert admission.cap("e0") == 8
    assert "too little" in admission.reason("e0")


def test_until_it_knows_enough_it_holds_more_while_contexts_are_a_third_of_what_would_fit() -> None:
    admission = PredictiveCap()
    admission.joined(EngineInfo("e0", 131_072, 16_384))
    for n in range(20):
        held = Held(admission.cap("e0"))
        held.working_tokens = 2_000 * held.active  # all wait on a slow tool
        admission.observe(held, load(0.1), 5.0 * n)
    assert admission.cap("e0") == 22, "131,072 tokens / 3 / 2,000"


def test_a_reading_that_did_not_come_is_not_read_as_free() -> None:
    loop = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=1)
    loop.run(300)
    admission, state = loop.admission, loop.core.fleet["e0"]
    before = admission.cap("e0")
    admission.observe(state, None, 310.0)
    assert admission.cap("e0") == before
    assert admission.room("e0", state.active) <= 0


def test_an_engine_without_metrics_is_run_by_latency_and_says_so() -> None:
    loop = ClosedLoop(PredictiveCap(Bounds(initial=2)), swe_small(1.0), seed=1, metrics=False)
    trace = loop.run(1200)
    assert trace.samples[-1].cap > 6
    assert any("no metrics" in why for _, _, why in trace.notes)


def test_it_ramps_within_two_minutes_and_keeps_to_the_good_side_of_the_cliff() -> None:
    fixed = ClosedLoop(FixedCap(24), swe_small(6.0), seed=3)
    fixed.run(2400)
    loop = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=3)
    trace = loop.run(2400)
    assert loop.goodput(600) > 0.93 * fixed.goodput(600)
    assert next(s.at for s in trace.samples if s.active >= 18) <= 120
    assert not trace.cancelled
    assert len(trace.parked) < 0.02 * trace.completed


@pytest.mark.parametrize("poll_s", [4.0, 30.0])
def test_it_does_as_well_with_readings_that_come_at_other_intervals(poll_s: float) -> None:
    """What it adds up between two readings is by the time between them, whatever that is."""
    every_five = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=3)
    every_five.run(2400)
    loop = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=3, poll_s=poll_s)
    loop.run(2400)
    assert loop.goodput(600) > 0.93 * every_five.goodput(600)


@pytest.mark.parametrize("every_s", [1.0, 4.0, 5.0, 10.0, 30.0])
def test_calls_under_way_are_a_mean_over_time_also_after_a_silence(every_s: float) -> None:
    admission, engine = PredictiveCap(Bounds()), Held(active=10)
    engine.calls, engine.calling_tokens = 10, 10_000
    admission.joined(EngineInfo("e0", 100_000, 1000))
    state, now = admission["e0"], 0.0
    for number in range(10):
        admission.turn_granted(engine, flight(number=number), now)  # type: ignore[arg-type]
    for _ in range(int(300 / every_s)):
        now += every_s
        admission.observe(engine, load(0.1, running=10), now)  # type: ignore[arg-type]
    assert state.pinned == pytest.approx(10.0, rel=0.01)
    admission.observe(engine, None, now + 100.0)  # type: ignore[arg-type]
    admission.observe(engine, load(0.1, running=10), now + 105.0)  # type: ignore[arg-type]
    assert state.pinned == pytest.approx(10.0, rel=0.01)


def test_several_engines_have_a_cap_each() -> None:
    loop = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=1, engines=2)
    loop.run(900)
    caps = [loop.admission.cap(name) for name in loop.engines]
    assert all(15 < cap < 40 for cap in caps)


def test_what_it_learnt_survives_a_restart() -> None:
    loop = ClosedLoop(PredictiveCap(), swe_small(6.0), seed=1)
    loop.run(900)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(loop.admission.snapshot()))
    again = PredictiveCap()
    again.restore(saved)
    later = ClosedLoop(again, swe_small(6.0), seed=2)
    assert later.admission.cap("e0") > 15
    trace = later.run(300)
    assert trace.samples[4].active > 15


def test_the_latest_waits_and_the_longest_rollouts_survive_a_restart() -> None:
    env = EnvStats()
    for number in range(1324):
        env.asked(1, 100, 10, float(number))
    env.asked(20, 5000, 10, 1324.0)  # of a rollout that went on after an earlier restart
    again = EnvStats()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(env.snapshot())))
    assert list(again._waits) == [float(number) for number in range(1325 - 256, 1325)]
    assert again._reached[20] == 1.0
    # What lies behind a gap says nothing of how contexts grow up to there.
    seen = env.profile(longest=10_000.0, now=0.0)
    assert np.isfinite([seen.turns, seen.context, seen.sd]).all()


def test_state_of_another_controller_is_ignored() -> None:
    admission = PredictiveCap(Bounds(initial=3))
    admission.restore({"type": "adaptive", "caps": {"e0": 99.0}})
    assert admission.cap("e0") == 3


def test_the_modelled_engine_caches_prefixes_preempts_when_full_and_loses_no_token() -> None:
    speed = EngineSpeed(kv_tokens=2_000, max_model_len=2_000)
    engine = EngineModel(speed)
    for key in range(4):
        engine.submit(key, 400, 300, 0.0)
    done = {call.key: call for call in engine.advance(1e4)}
    assert {call.sampled for call in done.values()} == {300}
    assert engine.preemptions > 0
    assert engine.load().generated_tokens == 1200
    engine.submit(3, 700, 10, 1e4)
    [again] = engine.advance(2e4)
    assert again.cached > 0


def test_a_rollout_of_an_earlier_life_may_have_more_turns_than_were_ever_seen() -> None:
    env = EnvStats()
    env.finished(turns=300, first=10, final=3000, seconds=60.0, wait_s=0.0)
    env.asked(1000, 9000, 10, 0.0)
    assert env.ended == 1.0


def test_what_a_rollout_had_before_a_restart_is_not_taken_for_new_at_its_next_turn() -> None:
    cap, engine, goes_on = PredictiveCap(), Held(), flight()
    goes_on.turns, goes_on.context = 5, 8000
    cap.turn_asked(engine, goes_on, 1.0)
    goes_on.turns, goes_on.known, goes_on.context = 6, 8100, 8400
    cap.turn_asked(engine, goes_on, 2.0)
    (env,) = cap._envs.values()
    assert (env.prompt_tokens, env.new_tokens) == (16_400, 300)


def test_what_new_weights_made_useless_is_no_miss_of_the_cache() -> None:
    cap, engine, one = PredictiveCap(), Held(), flight()
    for turn, (version, cached) in enumerate([(0, 0), (0, 950), (1, 0), (1, 2950), (2, 0)], start=1):
        one.turns, one.context, engine.held = turn, 1000 * turn, version
        cap.turn_asked(engine, one, float(turn))
        cap.turn_granted(engine, one, float(turn))
        one.context += 50
        cap.segment_ended(engine, one, 50, cached, 0.5, None, turn + 0.5)
    state = cap["e0"]
    assert (state.prefix, state.cached) == (2000 + 4000, 950 + 2950)
