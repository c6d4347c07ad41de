"""An engine whose GPUs have sequences of their own: as fast as one with a common cache while they have equally much, and
what happens when they have not."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_kit import Kept, simulation

from paceline.core.admission import FixedCap
from paceline.domain import events as on
from paceline.errors import ConfigError
from paceline.sim.engine import GPUS, MODELS, Call, EngineModel, RankedEngine, Speed, speed_of
from paceline.testing.simulated import Checked

PLAIN = Speed(kv_tokens=16_000, max_model_len=2_000, max_num_seqs=64, max_batched_tokens=2048)


def ends(engine: EngineModel | RankedEngine) -> dict[object, float]:
    """When each call finishes."""
    found = {}
    while engine.next_at < inf:
        at = engine.next_at
        for call in engine.run(at):
            found[call.key] = at
    return found


@pytest.mark.parametrize("ranks", [1, 4, 32])
@pytest.mark.parametrize("length", [1, 700])
def test_ranks_with_equally_much_to_do_are_as_fast_as_one_engine_with_all_of_it(
    ranks: int, length: int
) -> None:
    speed = speed_of(
        MODELS["kimi-k2"], GPUS["H800"], gpus=32, expert_parallel=True, max_num_seqs=1024, max_batched_tokens=65_536
    )  # fmt: skip
    common, apart = EngineModel(speed), RankedEngine(speed, ranks)
    for engine in (common, apart):
        engine.stop(0.0)  # so that all of them begin with the same step
        for number in range(6 * ranks):
            engine.submit(Call(number, 300, length), 0.0)
        engine.go_on(0.0)
    together = ends(common)
    assert len(together) == 6 * ranks
    assert ends(apart) == {key: pytest.approx(at, rel=1e-9) for key, at in together.items()}
    assert apart.totals.generated == common.totals.generated
    assert apart.totals.prefilled == common.totals.prefilled


def test_a_rank_that_is_full_preempts_while_the_engine_has_room() -> None:
    """Two long ones of the four meet on the same rank."""
    lengths = (700, 20, 700, 20)
    speed = msgspec.structs.replace(PLAIN, kv_tokens=4_000)
    common, apart = EngineModel(speed), RankedEngine(speed, 2)
    for engine in (common, apart):
        for number, length in enumerate(lengths):
            engine.submit(Call(number, 600, length), 0.0)
    ends(common)
    assert common.totals.preemptions == 0
    usage = []
    while apart.next_at < inf:
        apart.run(apart.next_at)
        usage.append(apart.load(apart.next_at if apart.next_at < inf else 99.0).kv_usage)
    assert apart.totals.preemptions > 0
    assert max(usage) < 0.8


def test_a_request_goes_to_the_rank_with_fewest_requests_and_stays_there() -> None:
    engine = RankedEngine(PLAIN, 3)
    calls = [Call(number, 100, 50 if number == 1 else 400) for number in range(6)]
    for call in calls:
        engine.submit(call, 0.0)
    assert [rank.calls for rank in engine.ranks] == [2, 2, 2]
    engine.abort(calls[3], 0.0)
    engine.submit(Call("next", 100, 10), 0.0)
    assert [rank.calls for rank in engine.ranks] == [2, 2, 2]
    while calls[1].running != 3:
        engine.run(engine.next_at)
    assert engine.ranks[1].calls == 1


def test_a_context_that_no_rank_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="a context of 2000 tokens does not fit one of 16 ranks with 1000"):
        RankedEngine(PLAIN, 16)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_leaves_nothing_behind(seed: int) -> None:
    random = Random(seed)
    engine = RankedEngine(
        msgspec.structs.replace(PLAIN, kv_tokens=3_000, max_model_len=900), random.randint(1, 3)
    )
    calls: dict[int, Call] = {}
    now, version = 0.0, 0
    done: list[Call] = []
    gone: set[object] = set()

    def run() -> None:
        for call in engine.run(now):
            done.append(call)
            runs = call.versions(engine.version)
            assert sum(tokens for _, tokens in runs) == call.target
            assert [v for v, _ in runs] == sorted({v for v, _ in runs})

        check()

    def check() -> None:
        assert engine.next_at == min(rank.next_at for rank in engine.ranks)
        there = [[*rank._running.values(), *rank._waiting] for rank in engine.ranks]
        assert engine._counts == [sum(not call.has_left for call in calls) for calls in there]

    for number in range(40):
        call = calls[number] = Call(number, random.randint(70, 600), random.randint(1, 300))
        engine.submit(call, now)
        check()
        there = [c for c in calls.values() if c.key not in gone and c not in done]
        chance = random.random()
        if chance < 0.3:
            victim = random.choice(there)
            engine.abort(victim, now)
            gone.add(victim.key)
            check()
        elif chance < 0.4:
            engine.stop(now, drain=random.random() < 0.5)
            while not engine.is_still:
                now = engine.next_at
                run()
            version += 1
            engine.go_on(now, version, recompute=random.random() < 0.5)
        elif chance < 0.42:
            gone |= {c.key for c in engine.kill()}
        now += random.expovariate(2.0)
        run()
    while engine.next_at < inf:
        now = engine.next_at
        run()
    assert sorted([*(c.key for c in done), *gone]) == list(range(40))
    assert engine._of == {}
    told = engine.load(now)
    assert (told.running, told.waiting, told.kv_usage) == (0, 0, 0.0)
    assert (told.generated_tokens, told.preemptions) == (engine.totals.generated, engine.totals.preemptions)


@pytest.mark.parametrize("preset", ["code-single", "swe-small"])
def test_a_run_trains_every_step_with_ranked_engines(preset: str) -> None:
    kept = Kept()
    speed = Speed(kv_tokens=160_000, max_model_len=40_000)
    sim = simulation(
        preset, admission=FixedCap(10), speed=speed, make=lambda of: RankedEngine(of, 4), max_steps=2, poll_s=5.0,
        folds=[kept], watch=Checked(),
    )  # fmt: skip
    sim.run()
    assert sim.finish is not None
    assert sim.finish.status == "done"
    loads = [e.load for _, e, _ in kept.entries if isinstance(e, on.LoadReported) and e.load is not None]
    assert 0.0 < max(load.kv_usage for load in loads) <= 1.0
    assert loads[-1].generated_tokens <= sum(engine.totals.generated for engine in sim.engines.values())
