"""Speculative decoding: the published formula, when it pays, and what it leaves of the engine's bookkeeping."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sim_kit import Kept, simulation, small_setup

from paceline.core.scheduling import Divided
from paceline.domain import events as on
from paceline.sim.engine import GPUS, MODELS, Accepted, Call, EngineModel, Speculation, Speed, speed_of
from paceline.sim.engine.endpoint import drive
from paceline.sim.engine.speculation import UNIT, Drafter, likelihood, pass_tokens
from paceline.testing.simulated import Checked

PLAIN = Speed(kv_tokens=16_000, max_num_seqs=64, max_batched_tokens=2048)
DRAFTS = Speculation(draft_s=2e-4, draft_seq_s=4e-6)
SPECULATES = msgspec.structs.replace(PLAIN, speculation=DRAFTS)


@given(
    batch=st.integers(1, 200), context=st.integers(1, 300_000), right=st.floats(0.01, 0.95), most=st.integers(1, 12)
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_token_takes_the_least_of_the_published_formula(
    batch: int, context: int, right: float, most: int
) -> None:
    speed = msgspec.structs.replace(PLAIN, max_batched_tokens=10**6)
    speculation = Speculation(most=most, draft_s=2e-4, draft_seq_s=4e-6)
    pace = Drafter(speculation, speed).pace(batch, context, round(UNIT * right) * batch)

    def t_sd(drafted: int) -> float:
        draft = drafted * (2e-4 + batch * 4e-6)
        verify = speed.gemm_s(batch, batch * (1 + drafted)) + speed.overhead_s + batch * speed.seq_s
        verify += context * max(speed.kv_s, (1 + drafted) * speed.attention_s)
        return (1 - right) * (draft + verify) / (1 - right ** (drafted + 1))

    least = min(t_sd(drafted) for drafted in range(most + 1))
    assert pace.step_s + pace.kv_s * context == pytest.approx(least, rel=1e-4)


def test_a_lone_request_takes_its_prefill_and_then_a_share_of_a_pass_for_each_token() -> None:
    engine = EngineModel(SPECULATES)
    call = Call("r", 500, 301, references=5)
    engine.submit(call, 0.0)
    drive(engine)
    pace = Drafter(DRAFTS, PLAIN).pace(1, 501, call.likely)
    n, context = 300, 501  # the prefill samples the first token
    decode = n * pace.step_s + pace.kv_s * (n * context + n * (n + 1) / 2)
    assert engine.totals.busy_s == pytest.approx(PLAIN.prefill_s(0, 500) + decode, rel=1e-9)
    assert pace.tokens > 1.5
    assert engine.totals.steps == 301
    assert engine.totals.passes == pytest.approx(1 + 300 / pace.tokens)


@pytest.mark.parametrize("references", [0, 1, 5, 15])
def test_mean_tokens_of_a_pass_are_those_that_seer_measured(references: int) -> None:
    measured = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}[references]
    right = Drafter(Speculation(), PLAIN).likelihood(references) / UNIT
    assert pass_tokens(right, 8) == pytest.approx(measured, abs=1e-4)
    assert likelihood(measured, 8) == pytest.approx(right, abs=1e-6)


def test_more_references_are_never_slower_and_beyond_the_measured_no_faster() -> None:
    drafter = Drafter(Speculation(), PLAIN)
    known = [drafter.likelihood(references) for references in range(40)]
    assert known == sorted(known)
    assert len(set(known[:16])) == 16
    assert len(set(known[15:])) == 1


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    """A batch whose products are bound by compute: each drafted token costs as much as a sampled one."""
    speed = speed_of(MODELS["qwen3-8b"], GPUS["H100"])
    drafter = Drafter(Speculation(references="none"), speed)
    right = drafter.likelihood(0)
    small, large = drafter.pace(4, 4 * 50, 4 * right), drafter.pace(400, 400 * 50, 400 * right)
    assert small.tokens > 1.5
    assert large.tokens == 1.0
    assert large.step_s == speed.decode_s(400)


def test_nothing_is_drafted_above_the_batch_that_is_named() -> None:
    drafter = Drafter(Speculation(off_above=8), PLAIN)
    right = drafter.likelihood(15)
    assert drafter.pace(8, 4000, 8 * right).tokens > 1
    assert drafter.pace(9, 4000, 9 * right).tokens == 1


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_request_gets_its_tokens_and_a_batch_that_is_empty_expects_nothing(seed: int) -> None:
    random = Random(seed)
    engine = EngineModel(
        msgspec.structs.replace(SPECULATES, kv_tokens=4_000, max_num_seqs=16, max_batched_tokens=700)
    )
    calls, now, aborted, done = {}, 0.0, set(), []
    for number in range(40):
        call = calls[number] = Call(
            number, random.randint(1, 600), random.randint(1, 400), references=random.randint(0, 15)
        )
        engine.submit(call, now)
        if random.random() < 0.3:
            victim = calls[random.randrange(number + 1)]
            if not victim.has_left:
                engine.abort(victim, now)
                aborted.add(victim.key)
        now += random.expovariate(2.0)
        done += engine.run(now)
    while engine.next_at < inf:
        done += engine.run(engine.next_at)
    assert sorted([*aborted, *(call.key for call in done)]) == list(range(40))
    assert all(call.sampled == call.target for call in done)
    assert engine._likely == engine._batch == 0
    assert 0 < engine.totals.passes <= engine.totals.steps


def test_what_was_sampled_by_a_moment_is_told_at_that_moment() -> None:
    engine = EngineModel(SPECULATES)
    call = Call("r", 320, 1000)
    engine.submit(call, 0.0)
    seen = []
    for tenth in range(1, 31):
        engine.run(tenth / 10)
        seen.append(engine.load(tenth / 10).generated_tokens)
    assert seen == sorted(seen)
    engine.abort(call, 3.0)
    assert call.sampled == seen[-1]
    assert 0 < call.sampled < 1000


def test_cost_does_not_depend_on_how_many_tokens_are_sampled() -> None:
    counted = []
    for length in (100, 10_000):
        engine = EngineModel(msgspec.structs.replace(SPECULATES, kv_tokens=10**7))
        for number in range(20):
            engine.submit(Call(number, 100, length + number, references=number), 0.0)
        drive(engine)
        counted.append(engine.totals.events)
    assert counted[0] == counted[1]


def test_a_batch_ends_sooner_with_drafts_from_its_groups_than_with_its_own_alone() -> None:
    ended = []
    for drafts in (None, Speculation(references="none"), Speculation(references="group")):
        kept = Kept()
        sim = simulation(
            of=small_setup(seed=7, max_steps=2, lag=0, group_size=8),
            scheduling=Divided(400, 0.25),
            speed=msgspec.structs.replace(PLAIN, kv_tokens=60_000, max_model_len=40_000, speculation=drafts),
            folds=[kept],
            watch=Checked(),
        )
        sim.run()
        ended.append(next(at for at, event, _ in kept.entries if isinstance(event, on.StepTrained)))
    assert ended == sorted(ended, reverse=True)
    assert ended[2] < 0.95 * ended[1] < 0.95 * ended[0]


@pytest.mark.parametrize(
    ("accepted", "of", "said"),
    [
        (((0, 1.7), (0, 2.0)), 8, "0 references before 0: order it"),
        (((5, 1.7), (1, 2.0)), 8, "5 references before 1: order it"),
        (((0, 3.0),), 2, "at most 3, and some are wrong: raise accepted_of"),
    ],
)
def test_measurements_that_cannot_be_are_refused(
    accepted: tuple[tuple[int, float], ...], of: int, said: str
) -> None:
    given_ = tuple(Accepted(references=n, tokens=tokens) for n, tokens in accepted)
    with pytest.raises(ValidationError, match=said):
        Speculation(accepted=given_, accepted_of=of)
