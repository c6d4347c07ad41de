"""Metrics and the lower bound, on cases that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from sim_kit import simulation

from paceline.core.admission import FixedCap
from paceline.core.scheduling import Scheduling, Synchronous, TailRounds, UnbiasedTail
from paceline.domain.commands import StartRollout
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.errors import ConfigError
from paceline.sim.bound import Bound, lower_bound, tail_probability
from paceline.sim.cells import Drawn
from paceline.sim.engine import GPUS, MODELS, Call, EngineModel, Speed, speed_of
from paceline.sim.engine.endpoint import drive
from paceline.sim.measure import Measure, StepSeen
from paceline.sim.metrics import (
    Summary,
    confidence,
    counted_steps,
    engine_use,
    gaps,
    length_bias,
    length_biases,
    ramp_s,
    summarize,
    tail_s,
)
from paceline.sim.plan import RolloutPlan, Workload
from paceline.sim.workloads import PRESETS, Reasoning, ReasoningLengths, workload_of

EVEN = Speed(
    kv_tokens=10**7, weights_s=0.01, overhead_s=0.0, seq_s=0.0, token_s=0.0, kv_s=0.0, attention_s=0.0,
    max_num_seqs=1024, max_model_len=10**6, max_batched_tokens=1 << 20,
)  # fmt: skip
"""Every step takes 10 ms, whatever the batch."""


class TwoPercent:
    """2% of the rollouts are ten times as long."""

    longest = 2000

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        long = command.noise_seed % 50 == 0
        return RolloutPlan(
            prompt=16, turns=((0.0, 0, 1000 if long else 100),), reward=command.rollout.member % 2
        )


def test_s10_a_batch_of_128_holds_a_long_one_in_92_percent_of_the_steps() -> None:
    assert tail_probability(0.02, 128) == pytest.approx(0.925, abs=5e-4)


def test_s10_a_synchronous_step_takes_as_long_as_its_longest_rollout() -> None:
    measure = Measure()
    sim = simulation(
        workload=TwoPercent(), speed=EVEN, engines=1, train_s=0.0, scheduling=Synchronous(), lag=0, max_staleness=0,
        admission=FixedCap(200), batch=128, group_size=2, max_steps=60, folds=[measure],
    )  # fmt: skip
    sim.run(steps=50)
    long = [max(seen.lengths) > 100 for seen in measure.steps]
    # 50 steps: 92.5% of them with a long one, to three standard deviations.
    assert abs(np.mean(long) - 0.925) < 3 * (0.925 * 0.075 / 50) ** 0.5
    for seen, is_long in zip(measure.steps, long, strict=True):
        assert seen.cut - seen.began == pytest.approx(10.0 if is_long else 1.0, rel=0.03)


def test_a_summary_adds_up_what_was_trained() -> None:
    measure = Measure()
    simulation(folds=[measure], max_steps=3).run()
    summary = summarize(measure, skip=1)
    assert summary is not None
    assert summary.steps == 2
    tokens = sum(seen.tokens for seen in measure.steps[1:])
    assert summary.goodput * summary.seconds == pytest.approx(tokens)
    assert summary.seconds == pytest.approx(measure.steps[2].trained - measure.steps[0].trained)
    assert summarize(measure, skip=3) is None


def test_where_a_run_overlaps_a_batch_takes_the_time_between_two_cuts() -> None:
    """Its rollouts had all begun before the cut of the one before: the first start after that is of another batch."""
    measure = Measure()
    simulation(
        workload=TwoPercent(), speed=EVEN, engines=1, train_s=4.0, lag=1, max_staleness=4,
        admission=FixedCap(60), batch=32, group_size=2, max_steps=12, folds=[measure],
    ).run()  # fmt: skip
    steps = measure.steps
    between = [after.cut - before.cut for before, after in pairwise(steps)]
    assert any(seen.began > before.cut + 1.0 for before, seen in pairwise(steps))
    summary = summarize(measure, skip=1, overlapped=True)
    assert summary is not None
    assert summary.rollout_s == pytest.approx(np.mean(between[: summary.steps]))
    apart = summarize(measure, skip=1)
    assert apart is not None
    assert apart.rollout_s < 0.9 * summary.rollout_s


def test_the_tail_is_the_time_of_the_last_tenth() -> None:
    assert tail_s([float(n) for n in range(1, 101)]) == 10.0
    assert tail_s([1.0] * 10) == 0.0


def test_length_bias_is_nought_for_the_same_lengths_and_shows_what_is_missing() -> None:
    drawn = [100] * 90 + [1000] * 10
    same = length_bias(drawn, drawn)
    assert (same.mean, same.ks, same.cap_share) == (0.0, 0.0, 0.1)
    raced = length_bias([100] * 90, drawn)
    assert raced.mean == pytest.approx(100 / 190 - 1)
    assert raced.cap_share == 0.0
    assert raced.ks == pytest.approx(0.1)


def test_a_ramp_ends_where_tokens_come_at_the_later_rate() -> None:
    times = [30.0 * n for n in range(21)]
    rates = [0, 10, 50, 89, 95, *[100] * 16]
    tokens = np.cumsum(30.0 * np.array(rates)).tolist()
    assert ramp_s(times, tokens, 300.0) == 120.0
    assert ramp_s(times, tokens, 300.0, share=0.85) == 90.0
    # Over two minutes the slow beginning weighs on.
    assert ramp_s(times, tokens, 300.0, over_s=120.0) == 180.0


def test_a_ramp_of_a_run_that_never_settles_takes_all_of_it() -> None:
    times = [0.0, 30.0, 60.0, 90.0]
    assert ramp_s(times, [0.0, 0.0, 0.0, 0.0], 600.0) == 30.0  # nothing is nine tenths of nothing
    assert ramp_s([0.0], [0.0], 600.0) == 0.0
    # All that comes, comes in the last look: no earlier stretch has its rate.
    assert ramp_s(times, [0.0, 0.0, 0.0, 900.0], 600.0) == 90.0


def seen_step(
    *,
    lengths: Sequence[int],
    drawn: Sequence[float],
    envs: Sequence[str] = (),
    until: float = 100.0,
    began: float = 0.0,
) -> StepSeen:
    count = len(lengths)
    return StepSeen(
        step=1, began=began, cut=until, tokens=sum(lengths), signal_tokens=0, lengths=list(lengths), ends=[until] * count,
        staleness=[0] * count, versions=[1] * count, envs=list(envs or ["env"] * count), drawn=list(drawn), tasks=set(),
        settled_until=until, trained=until,
    )  # fmt: skip


def test_lengths_are_compared_by_environment_and_by_what_is_settled() -> None:
    steps = [
        seen_step(lengths=[100, 300, 7], drawn=[1.0, 2.0, 3.0], envs=["a", "a", "b"]),
        # Drawn before these steps, and after the moment by which all is settled: neither has its like among `drawn`.
        seen_step(lengths=[9000, 9000, 9], drawn=[-1.0, 60.0, 4.0], envs=["a", "a", "b"], until=50.0),
    ]
    found = length_biases(steps, {"a": [100, 300, 800], "b": [7, 9], "c": []})
    assert set(found) == {"a", "b"}
    count, bias = found["a"]
    assert (count, bias.mean) == (2, pytest.approx(200 / 400 - 1))
    assert found["b"] == (2, length_bias([7, 9], [7, 9]))


def test_gaps_are_to_the_work_of_one_step_and_to_the_trainer() -> None:
    summary = Summary(
        steps=4, seconds=200.0, goodput=1.0, signal_goodput=1.0, step_s=50.0, rollout_s=30.0, train_s=15.0, tail_s=1.0,
        mean_length=1.0, staleness_mean=0.0, staleness_max=0, versions_max=1, mixed_share=0.0, group_s=1.0, gate_s=0.0,
        wasted_share=0.0,
    )  # fmt: skip
    bound = Bound(work_s=80.0, path_s=60.0, even_s=90.0)  # of all four steps
    apart = gaps(summary, bound, share=0.25, overlapped=False)
    assert (apart.bound_s, apart.rollout, apart.step, apart.even) == (
        20.0,
        0.5,
        pytest.approx(50 / 35 - 1),
        None,
    )
    together = gaps(summary, bound, share=0.25, overlapped=True)
    assert together.step == pytest.approx(50 / 20 - 1)
    assert together.rollout is None
    longer = msgspec.structs.replace(summary, train_s=40.0)
    assert gaps(longer, bound, share=0.25, overlapped=True).step == pytest.approx(50 / 40 - 1)
    one = msgspec.structs.replace(summary, steps=1, rollout_s=99.0)
    assert gaps(one, bound, share=1.0, overlapped=False).even == pytest.approx(0.1)


def test_the_use_of_engines_adds_up() -> None:
    """One engine works alone for its one call, and one stands still."""
    busy, still = EngineModel(EVEN), EngineModel(EVEN)
    busy.submit(Call("a", 64, 100), 0.0)
    drive(busy)
    took = busy.busy_until(1e9)[0]
    use = engine_use([busy, still], 2 * took)
    assert took == pytest.approx(1.0, rel=0.05)
    assert use.idle == pytest.approx(0.75)
    # It holds 4 blocks of 16 tokens at first and 11 at last: 7 or 8 on average, half of the time, on one of two engines.
    blocks = EVEN.kv_tokens // EVEN.block
    assert 7 / 4 <= use.kv_use * blocks <= 8 / 4
    assert (use.generated, use.preemptions, use.recomputed, use.prefix_hits) == (100, 0, 0, 0.0)
    assert use.tokens_per_pass is None


def test_the_use_of_engines_knows_what_was_found_cached_and_what_was_computed_twice() -> None:
    engine = EngineModel(msgspec.structs.replace(EVEN, kv_tokens=16 * 20))
    engine.submit(Call("first", 160, 8, chain=(("group", 9),)), 0.0)
    drive(engine)
    engine.submit(Call("second", 160, 8, chain=(("group", 9),)), 100.0)
    drive(engine)
    use = engine_use([engine], 200.0)
    assert 0.4 < use.prefix_hits < 0.5  # all but the last block of the second, of two prompts
    assert use.preemptions == 0
    for key in "ab":
        engine.submit(Call(key, 100, 150), 200.0)
    drive(engine)
    use = engine_use([engine], 300.0)
    assert use.preemptions >= 1
    assert (
        0 < use.recomputed <= 160
    )  # what of its context the other one had not yet pushed out, it finds again


def test_an_interval_is_that_of_student() -> None:
    mean, half = confidence([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)
    assert confidence([5.0]) == (5.0, 0.0)


def test_the_bound_of_even_steps_is_the_longest_path_or_the_work() -> None:
    few = lower_bound([16] * 4, [100, 100, 100, 1000], EVEN, 1)
    assert few.path_s == pytest.approx(10.0)
    assert few.seconds == few.path_s
    assert few.even_s == few.path_s  # the one engine takes all the steps of the longest
    spread = lower_bound([16] * 4, [100, 100, 100, 1000], EVEN, 4)
    assert spread.work_s < 0.01
    assert spread.even_s == pytest.approx(10.0)
    many = lower_bound([16] * 4096, [1000] * 4096, EVEN, 1)
    assert many.work_s == pytest.approx(4 * 1000 * 0.01)  # four batches of 1024 sequences
    assert many.even_s == many.work_s
    with pytest.raises(ConfigError, match="3 prompts and 2 lengths"):
        lower_bound([1, 1, 1], [1, 1], EVEN, 1)


class Signalling:
    """A workload whose groups all train."""

    def __init__(self, of: Workload) -> None:
        self._of, self.longest = of, of.longest

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        return msgspec.structs.replace(self._of.plan(command, now), reward=float(command.rollout.member % 2))


QWEN = speed_of(MODELS["qwen3-8b"], GPUS["H100"], gpus=1, max_model_len=40_000)
MIXTURE = speed_of(MODELS["qwen3-30b-a3b"], GPUS["H100"], gpus=2, max_model_len=40_000)


@pytest.mark.parametrize(
    ("shape", "speed", "most"),
    [
        # Nothing but answers, in caches that are soon full.
        (PRESETS["tailsieve"], Speed(kv_tokens=60_000, max_model_len=40_000), 256),
        # Prompts as long as answers, which are prefilled beside what decodes.
        (ReasoningLengths(median=300, sigma=0.4, cap=1200, prompt=300), QWEN, 64),
        (ReasoningLengths(median=200, sigma=0.4, cap=800, prompt=600), QWEN, 32),
        (ReasoningLengths(median=200, sigma=0.4, cap=800, prompt=300), QWEN, 16),
        # How many experts a step reads goes by its sequences.
        (ReasoningLengths(median=200, sigma=1.0, cap=2000, prompt=100), MIXTURE, 64),
    ],
    ids=["full", "even", "prompts", "few", "experts"],
)
def test_no_simulated_batch_is_faster_than_the_bound(
    shape: ReasoningLengths, speed: Speed, most: int
) -> None:
    measure, drawn = Measure(), Drawn(Signalling(workload_of(shape, 3)))
    speed = msgspec.structs.replace(speed, max_num_seqs=most)
    sim = simulation(
        workload=drawn, batch=1024, group_size=2, engines=2, speed=speed, train_s=0.0, scheduling=Synchronous(), lag=0,
        max_staleness=0, admission=FixedCap(2 * most), max_steps=4, folds=[measure],
    )  # fmt: skip
    sim.run(steps=2)
    for seen in measure.steps:
        plans = drawn.between(seen.began, seen.cut)
        assert sorted(plan.sampled for plan in plans) == sorted(seen.lengths)
        prompts, lengths = [plan.prompt for plan in plans], [plan.sampled for plan in plans]
        bound = lower_bound(prompts, lengths, speed, 2, group_size=2)
        assert bound.seconds <= seen.cut - seen.began < 2 * bound.seconds


class Alike:
    """Prompts that a group shares, and answers that are all as long."""

    longest = 1150

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        return RolloutPlan(prompt=650, turns=((0.0, 0, 500),), reward=float(command.rollout.member % 2))


def test_no_batch_of_groups_that_share_long_prompts_is_faster_than_the_bound() -> None:
    """The cache holds a prompt once for eight, so that more run at once than their contexts would let."""
    measure = Measure()
    speed = Speed(kv_tokens=12_000, max_model_len=4000)
    sim = simulation(
        workload=Alike(), batch=64, group_size=8, engines=1, speed=speed, train_s=0.0, scheduling=Synchronous(), lag=0,
        max_staleness=0, admission=FixedCap(64), max_steps=4, folds=[measure],
    )  # fmt: skip
    sim.run(steps=2)
    bound = lower_bound([650] * 64, [500] * 64, speed, 1, group_size=8)
    for seen in measure.steps:
        assert bound.seconds <= seen.cut - seen.began < 2 * bound.seconds


@pytest.mark.parametrize(
    ("preset", "mean", "at_cap", "icc"),
    [("rp-16k", 1367, 0.031, (0.05, 0.3)), ("seer-qwen-vl", 7615, 0.02, (0.75, 0.95)), ("tailsieve", 1880, 0.006, (0.6, 0.8))],
)  # fmt: skip
def test_presets_have_the_lengths_they_were_fitted_to(
    preset: str, mean: float, at_cap: float, icc: tuple[float, float]
) -> None:
    source = workload_of(PRESETS[preset], 5)
    shape = PRESETS[preset]
    assert isinstance(shape, ReasoningLengths)
    lengths = np.array([[_length(source, g, m) for m in range(8)] for g in range(1500)], float)
    assert lengths.mean() == pytest.approx(mean, rel=0.12)
    assert (lengths >= shape.cap).mean() == pytest.approx(at_cap, abs=0.012)
    within = lengths.var(axis=1, ddof=1).mean()
    between = lengths.mean(axis=1).var(ddof=1) - within / 8
    assert icc[0] < between / (between + within) < icc[1]


def test_a_task_and_a_noise_seed_say_all_about_a_rollout() -> None:
    shape = ReasoningLengths(median=500, sigma=1.0, cap=8000, icc=0.7)
    a, b = Reasoning(shape, 1), Reasoning(shape, 1)
    for task in (5, 1, 5, 9000, 1):
        assert _length(a, task, 3) == _length(b, task, 3)
    assert _length(a, 1, 3) != _length(Reasoning(shape, 2), 1, 3)


def _length(source: object, task: int, member: int) -> int:
    noise = (task * 7919 + member * 104_729) * 0x9E3779B97F4A7C15 % (1 << 62)
    command = StartRollout(RolloutId(task, member), TaskRef("env", "train", task), 0, noise, "e0", 0)
    return source.plan(command, 0.0).sampled  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [(UnbiasedTail(200, "pinned"), -0.02, 0.02), (TailRounds(1.25, 1.5), -0.16, -0.05)],
    ids=["unbiased_tail", "tail_rounds"],
)
def test_whole_cycles_tell_whether_what_is_trained_is_what_was_drawn(
    policy: Scheduling, low: float, high: float
) -> None:
    measure, drawn = Measure(), Drawn(TwoPercent())
    sim = simulation(
        workload=drawn, speed=EVEN, engines=1, train_s=1.0, scheduling=policy, lag=0, max_staleness=0,
        admission=FixedCap(200), batch=32, max_steps=90, folds=[measure],
    )  # fmt: skip
    sim.run(steps=80)
    counted = counted_steps(measure)
    waits = [seen.put_off for seen in measure.steps]
    assert max(waits) >= 16
    assert counted[-1].put_off == min(waits[40:80]) <= 4
    plans = drawn.between(counted[0].began, counted[-1].cut)
    trained = [length for seen in counted for length in seen.lengths]
    bias = length_bias(trained, [plan.sampled for plan in plans]).mean
    assert low < bias < high
