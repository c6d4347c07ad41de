"""Prefill and decode on engines of their own: what one request takes, who computes what, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_kit import Kept, simulation

from paceline.core.admission import FixedCap
from paceline.domain import events as on
from paceline.sim.engine import Call, EngineModel, Link, Speed, SplitEngine
from paceline.sim.engine.split import Recompute
from paceline.testing.simulated import Checked

PLAIN = Speed(kv_tokens=16_000, max_num_seqs=64, max_batched_tokens=512)
LINK = Link(token_s=4e-6, setup_s=1e-3)


def split(speed: Speed = PLAIN, prefill: int = 1, *, recompute: Recompute = "prefill", link: Link = LINK) -> SplitEngine:  # fmt: skip
    return SplitEngine(speed, [PLAIN] * prefill, link, recompute=recompute)


def drive(engine: SplitEngine) -> dict[object, float]:
    """When each call finishes."""
    ends = {}
    while engine.next_at < inf:
        at = engine.next_at
        for call in engine.run(at):
            ends[call.key] = at
    return ends


@given(st.integers(1, 500), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_a_request_takes_its_prefill_the_move_of_its_kv_and_its_decode(prompt: int, length: int) -> None:
    engine = split()
    call = Call("r", prompt, length)
    engine.submit(call, 0.0)
    ends = drive(engine)
    last = prompt - (prompt - 1) // 16 * 16  # tokens of the block that is computed again
    n = length - 1
    decode = n * PLAIN.decode_s(1) + PLAIN.kv_s * (n * (prompt + 1) + n * (n + 1) / 2)
    expected = PLAIN.prefill_s(0, prompt) + LINK.setup_s + prompt * LINK.token_s
    expected += PLAIN.prefill_s(prompt - last, last) + decode
    assert ends == {"r": pytest.approx(expected, rel=1e-9)}
    assert (call.sampled, call.cached) == (length, 0)
    assert engine.totals.generated == length


def test_contexts_move_one_after_the_other() -> None:
    slow = Link(token_s=1e-2)
    engine = split(link=slow)
    for name in ("first", "second"):
        engine.submit(Call(name, 100, 1), 0.0)
    ends = drive(engine)
    assert ends["second"] - ends["first"] == pytest.approx(100 * slow.token_s, abs=0.05)


def test_the_next_turn_computes_and_moves_only_what_is_new() -> None:
    moved = []
    for kept in (True, False):
        engine = split(link=Link(token_s=1.0))
        engine.submit(Call("r", 480, 17, own="talk"), 0.0)
        began = max(drive(engine).values())
        call = Call("r", 700, 1, own="talk" if kept else "other")
        engine.submit(call, began)
        moved.append(max(drive(engine).values()) - began)
        assert call.cached == (480 if kept else 0)  # the prefill engine has not seen what was sampled
    assert moved[0] == pytest.approx(700 - 496, abs=1)  # the decode engine has: whole blocks of 497 tokens
    assert moved[1] == pytest.approx(700, abs=1)


def test_a_request_goes_where_its_context_is_computed_soonest() -> None:
    engine = split(prefill=2)
    for number in range(4):
        engine.submit(Call(number, 400, 1), 0.0)
    assert [sum(s.engine == n for s in engine._stages.values()) for n in (0, 1)] == [2, 2]
    drive(engine)
    # The cache of whoever computed it is worth more than an even share.
    first = next(n for n in (0, 1) if engine.prefill[n]._cache.hits((), 0))
    again = Call(0, 450, 1)
    engine.submit(again, 50.0)
    assert [stage.engine for stage in engine._stages.values()] == [first]


@pytest.mark.parametrize("recompute", ["prefill", "decode"])
def test_a_preempted_request_is_computed_again_where_that_is_asked_for(recompute: Recompute) -> None:
    engine = split(msgspec.structs.replace(PLAIN, kv_tokens=1600), recompute=recompute)
    first, last = Call("first", 700, 200), Call("last", 700, 200)
    for call in (first, last):
        engine.submit(call, 0.0)
    assert list(drive(engine)) == ["first", "last"]
    assert engine.totals.preemptions == 1
    assert engine.totals.recomputed > 0
    by_prefill, by_decode = engine.prefill[0].totals.prefilled, engine.decode.totals.prefilled
    if recompute == "prefill":
        assert by_prefill > 1400
        assert by_decode < 4 * 16
    else:
        assert by_prefill == 1400
        assert by_decode > 4 * 16
    assert (first.sampled, last.sampled) == (200, 200)
    assert (first.cached, last.cached) == (0, 0)


def test_decoding_does_not_wait_for_the_prefill_of_others() -> None:
    ends = []
    for make in (lambda: EngineModel(PLAIN), split):
        engine = make()
        engine.submit(Call("decodes", 16, 300), 0.0)
        engine.run(0.5)
        for number in range(12):
            engine.submit(Call(number, 1000, 1), 0.5)
        while engine.next_at < inf:
            at = engine.next_at
            ends += [at for call in engine.run(at) if call.key == "decodes"]
    whole, apart = ends
    assert apart < 0.95 * whole


@given(st.integers(0, 10**6), st.sampled_from(["prefill", "decode"]))
@example(5205, "prefill")  # an engine is lost in the step that still carries an aborted call
@settings(max_examples=100, deadline=None)
def test_every_request_ends_once_and_leaves_nothing_behind(seed: int, recompute: Recompute) -> None:
    random = Random(seed)
    engine = split(
        msgspec.structs.replace(PLAIN, kv_tokens=3_000, max_num_seqs=12),
        prefill=random.randint(1, 3),
        recompute=recompute,
    )
    calls: dict[int, Call] = {}
    now, version = 0.0, 0
    done: list[Call] = []
    versions: dict[object, tuple[tuple[int, int], ...]] = {}
    aborted: set[object] = set()
    lost: set[object] = set()

    def run() -> None:
        for call in engine.run(now):
            done.append(call)
            versions[call.key] = call.versions(engine.version)

    for number in range(50):
        chain = ((("g", number % 5), 4),) if random.random() < 0.6 else ()
        call = calls[number] = Call(number, random.randint(70, 600), random.randint(1, 300), chain=chain)
        engine.submit(call, now)
        ended = {c.key for c in done} | aborted | lost
        chance = random.random()
        if chance < 0.3:
            victim = random.choice([c for c in calls.values() if c.key not in ended])
            engine.abort(victim, now)
            aborted.add(victim.key)
        elif chance < 0.4:
            engine.stop(now, drain=random.random() < 0.5)
            while not engine.is_still:
                now = engine.next_at
                run()
            version += 1
            engine.go_on(now, version, recompute=random.random() < 0.5)
        elif chance < 0.42:
            lost |= {c.key for c in engine.kill()}
        now += random.expovariate(2.0)
        run()
        check(engine)
    while engine.next_at < inf:
        now = engine.next_at
        run()
        check(engine)
    assert sorted([*(c.key for c in done), *aborted, *lost]) == list(range(50))
    assert all(c.sampled == c.target for c in done)
    for call in done:
        runs = versions[call.key]
        assert sum(tokens for _, tokens in runs) == call.target
        assert [v for v, _ in runs] == sorted({v for v, _ in runs})
    assert (engine._stages, engine._moving, engine._cached) == ({}, {}, {})
    assert engine._backlog == [0] * len(engine.prefill)
    told = engine.load(now)
    assert (told.running, told.waiting, told.kv_usage) == (0, 0, 0.0)


def check(engine: SplitEngine) -> None:
    """Every call is in one place, and blocks are what is counted."""
    decode = engine.decode
    there = [c.key for c in (*decode._running.values(), *decode._waiting) if not c.has_left]
    places = [*engine._stages, *engine._moving, *there]
    assert len(places) == len(set(places))
    assert set(places) >= set(engine._cached) - {c.key for c in engine._done}
    assert not decode.handed_back
    for each in (decode, *engine.prefill):
        assert each._held <= each._blocks or len(each._running) == 1
        assert each._cache.idle_blocks == sum(each._cache._line.values())


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain"])
def test_new_weights_stamp_what_is_sampled_after_them(mode: str) -> None:
    engine = split()
    runs, waits = Call("runs", 320, 300), Call("waits", 320, 50)
    engine.submit(runs, 0.0)
    engine.run(1.0)
    engine.stop(1.0, drain=mode == "drain")
    engine.submit(waits, 1.0)
    versions = {}

    def run() -> None:
        for call in engine.run(engine.next_at):
            versions[call.key] = [v for v, _ in call.versions(engine.version)]

    while not engine.is_still:
        run()
    engine.go_on(9.0, 1, recompute=mode == "recompute")
    while engine.next_at < inf:
        run()
    assert versions == {"runs": [0] if mode == "drain" else [0, 1], "waits": [1]}
    assert engine.totals.prefilled > (900 if mode == "recompute" else 640)
    assert {each.version for each in (engine.decode, *engine.prefill)} == {1}


def test_kv_of_old_weights_is_not_decoded_from_after_a_drain() -> None:
    """One waits with its KV moved, since the decode engine is full, when the weights come."""
    engine = split(msgspec.structs.replace(PLAIN, kv_tokens=1000))
    engine.submit(Call("runs", 700, 200), 0.0)
    engine.run(0.2)
    engine.submit(Call("moved", 700, 10), 0.2)
    engine.run(1.0)
    engine.stop(1.0, drain=True)
    while not engine.is_still:
        engine.run(engine.next_at)
    assert engine.prefill[0].totals.prefilled == 1400
    engine.go_on(9.0, 1)
    drive(engine)
    assert engine.prefill[0].totals.prefilled > 1400


CHANCES: list[tuple[str, Callable[[Speed], SplitEngine]]] = [
    ("prefill", lambda speed: SplitEngine(speed, [speed], LINK)),
    ("decode", lambda speed: SplitEngine(speed, [speed, speed], LINK, recompute="decode")),
]


@pytest.mark.parametrize(("name", "make"), CHANCES)
@pytest.mark.parametrize("preset", ["code-single", "swe-small"])
def test_a_run_trains_every_step_with_split_engines(
    name: str, make: Callable[[Speed], SplitEngine], preset: str
) -> None:
    kept = Kept()
    sim = simulation(
        preset, admission=FixedCap(10), make=make, max_steps=2, poll_s=5.0, folds=[kept], watch=Checked()
    )
    sim.run()
    assert sim.finish is not None
    assert sim.finish.status == "done"
    loads = [e.load for _, e, _ in kept.entries if isinstance(e, on.LoadReported) and e.load is not None]
    assert max(load.prefix_queries for load in loads) > max(load.prefix_hits for load in loads) > 0
