"""One request over HTTP: exact ids, which failures are tried again, and how it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_server import COMPLETIONS, GENERATE, FakeServer, Say

from paceline.engines.http import HttpEngine, Limits, Retry, connect
from paceline.errors import EngineError
from paceline.ports import GenerateRequest, SamplingParams

QUICK = Retry(attempts=3, first_s=0.01, most_s=0.02)
LIMITS = Limits(request_s=10.0, admin_s=5.0, load_weights_s=5.0, metrics_s=1.0, connect_s=2.0)


def request(name: str = "r1", tokens: int = 4, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.5, stop_token_ids=(7,), seed=3)
    return GenerateRequest(
        request_id=name, token_ids=np.arange(1, 5, dtype=np.int32), sampling=sampling, **more
    )


@asynccontextmanager
async def engine_on(fake: FakeServer, **options: Any) -> AsyncIterator[HttpEngine]:
    options = {"limits": LIMITS, "retry": QUICK, "start_s": 5.0} | options
    engine = await connect(fake.url, id="e0", served_name="policy", **options)
    fake.calls.clear()
    fake.peak = 0
    try:
        yield engine
    finally:
        await engine.close()


def a_reply(ids: Any, logprobs: Any, finish: str = "length", **more: Any) -> dict[str, Any]:
    entries = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
    return {"choices": [{"token_ids": ids, "logprobs": entries, "finish_reason": finish, **more}]}


# ---- what is sent and what comes back


async def test_ids_and_logprobs_come_back_as_read_only_arrays_with_their_versions() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        reply = await engine.generate(request(session="g0.m1.a0", cache_salt="v3"))
    assert reply.token_ids.tolist() == [100, 101, 102, 103]
    assert reply.token_ids.dtype == np.int32
    assert not reply.token_ids.flags.writeable
    assert reply.logprobs.dtype == np.float32
    assert reply.logprobs.tolist() == [-1.0] * 4
    assert (reply.finish, reply.versions, reply.cached_tokens) == ("length", ((0, 4),), 3)
    (call,) = fake.calls
    assert call.path == GENERATE
    assert call.headers["X-Session-ID"] == "g0.m1.a0"
    assert call.body == {
        "request_id": "r1",
        "token_ids": [1, 2, 3, 4],
        "model": "policy",
        "cache_salt": "v3",
        "sampling_params": {
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [7],
            "seed": 3,
            "logprobs": 0,
            "skip_special_tokens": False,
        },
    }


async def test_a_server_without_the_generate_route_is_used_over_completions() -> None:
    async with FakeServer(missing=(GENERATE,)) as fake, engine_on(fake) as engine:
        reply = await engine.generate(request())
        assert engine.facts.route == COMPLETIONS
    assert reply.token_ids.tolist() == [100, 101, 102, 103]
    assert reply.versions == ((0, 4),)
    assert fake.calls[0].body["return_token_ids"] is True


async def test_tokens_of_a_server_that_does_not_stamp_them_take_the_older_version_around_an_update() -> None:
    async with FakeServer(missing=(GENERATE,)) as fake, engine_on(fake) as engine:
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.running))
        await engine.update_weights(1, "/weights/v1")
        fake.hold.set()
        assert (await running).versions == ((0, 4),)
        assert (await engine.generate(request("r2"))).versions == ((1, 4),)


async def test_s66_each_request_carries_the_salt_it_was_given() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        for name, salt in (("a", "v3"), ("b", "v4"), ("c", "v4")):
            await engine.generate(request(name, cache_salt=salt))
        await engine.generate(request("frozen"))
    assert [call.body.get("cache_salt") for call in fake.calls] == ["v3", "v4", "v4", None]


# ---- S-27, S-89: what is not exact is refused


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (a_reply(None, [-0.1, -0.2]), "did not return token ids.*return_token_ids"),
        (a_reply([5, 6], None), "2 token ids and no logprobs.*logprobs"),
        (a_reply([5], [-0.1, -0.2]), "1 token ids and 2 logprobs"),
        (a_reply([5, -6], [-0.1, -0.2]), "token id -6 at position 1"),
        (a_reply([5, 2**40], [-0.1, -0.2]), f"token id {2**40}"),
        (a_reply([5, 6], [-0.1, -0.2], "mystery"), "finish_reason 'mystery'"),
        ({"choices": []}, "no choices"),
        ({"choises": 1}, "cannot be read"),
    ],
)
async def test_s27_a_reply_that_is_not_token_exact_is_refused_by_name(
    reply: dict[str, Any], complaint: str
) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(body=reply))
        with pytest.raises(EngineError, match=complaint) as caught:
            await engine.generate(request())
        assert fake.url in str(caught.value)
        assert len(fake.calls) == 1


async def test_s27_an_engine_without_token_ids_is_refused_at_the_start_with_the_option_to_switch_on() -> None:
    text_only = {
        "choices": [{"text": "alla", "logprobs": {"token_logprobs": [-0.1, -0.2]}, "finish_reason": "stop"}]
    }
    async with FakeServer(missing=(GENERATE,), reply=lambda _body: text_only) as fake:
        with pytest.raises(EngineError, match=r"return_token_ids.*--enable-scale-out"):
            await connect(fake.url, id="e0", served_name="policy", limits=LIMITS, start_s=2.0)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "nan"),
        (None, "null"),
        (float("-inf"), "-inf"),
        (float("inf"), "inf"),
        (0.3, "0.3"),
        (-9999.0, "-9999.0"),
    ],
)
async def test_s89_an_impossible_logprob_is_an_error_with_its_position_and_value(
    value: Any, told: str
) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(body=a_reply([5, 6, 7], [-0.1, value, -0.2])))
        with pytest.raises(EngineError, match=f"logprob {told} at position 1 of 3"):
            await engine.generate(request())
        assert (await engine.generate(request("next"))).token_ids.size == 4


async def test_s89_a_server_that_cannot_write_its_logprobs_is_not_asked_again() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(
            GENERATE, Say(status=500, body={"error": "Out of range float values are not JSON compliant"})
        )
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(request())
        assert len(fake.calls) == 1


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([("v1", 0, 1), ("v2", 2, 3)], "do not follow"),
        ([("v1", 0, 2)], "cover 2 of 3"),
        ([("theirs", 0, 3)], "'theirs'"),
    ],
)
async def test_versions_that_do_not_cover_the_tokens_are_refused(
    spans: list[tuple[str, int, int]], complaint: str
) -> None:
    versions = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(body=a_reply([5, 6, 7], [-0.1] * 3, weight_versions=versions)))
        with pytest.raises(EngineError, match=complaint):
            await engine.generate(request())


@pytest.mark.parametrize("body", [b"\x80\x04pickle", b"[" * 10_000, b"{}", b"", b'{"choices": 3}'])
async def test_s91_a_reply_of_any_bytes_is_an_engine_error_and_nothing_else(body: bytes) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(body=body))
        with pytest.raises(EngineError):
            await engine.generate(request())


# ---- S-58: which answers deserve a retry


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_s58_a_refusal_is_not_repeated(status: int) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(status=status))
        with pytest.raises(EngineError, match=f"answered {status}: scripted {status}"):
            await engine.generate(request())
        assert len(fake.calls) == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
async def test_s58_a_passing_failure_is_tried_three_times_in_all(status: int) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(status=status), Say(status=status))
        assert (await engine.generate(request("a"))).token_ids.size == 4
        fake.say(GENERATE, *[Say(status=status)] * 3)
        with pytest.raises(EngineError, match=r"\(try 3\)"):
            await engine.generate(request("b"))
        assert fake.paths() == [GENERATE] * 6


async def test_s58_retry_after_is_obeyed() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(status=429, headers={"Retry-After": "0.2"}))
        await engine.generate(request())
        first, second = fake.calls
        assert second.at - first.at >= 0.2


async def test_s58_a_wait_beyond_the_deadline_is_not_begun() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(status=429, headers={"Retry-After": "60"}))
        with pytest.raises(EngineError, match="429"):
            await engine.generate(request())


@pytest.mark.parametrize("asked", ["1e308", "inf", "nan", "-1", "86400", "Fri, 31 Dec 9999 23:59:59 GMT"])
async def test_s58_a_retry_after_that_nobody_can_mean_is_not_obeyed(asked: str) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(status=429, headers={"Retry-After": asked}))
        async with asyncio.timeout(5):
            await engine.generate(request())
        assert len(fake.calls) == 2


def test_s58_a_server_that_asks_for_hours_is_asked_again_in_a_minute() -> None:
    assert Retry().wait_s(1, retry_after_s=30.0) == 30.0
    assert Retry().wait_s(1, retry_after_s=80_000.0) == 60.0


def test_s58_waits_double_up_to_a_bound_and_never_undercut_the_server() -> None:
    retry = Retry(attempts=6, first_s=0.5, most_s=3.0)
    assert [retry.wait_s(failed) for failed in range(1, 7)] == [0.5, 1.0, 2.0, 3.0, 3.0, None]
    assert retry.wait_s(1, retry_after_s=2.0) == 2.0
    assert retry.wait_s(3, retry_after_s=0.0) == 2.0


@pytest.mark.parametrize("breaks", ["before", "middle"])
async def test_s58_a_try_that_may_have_arrived_is_aborted_before_the_next_under_a_new_id(breaks: Any) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(breaks=breaks))
        assert (await engine.generate(request())).token_ids.size == 4
        assert fake.paths() == [GENERATE, "/abort_requests", GENERATE]
        first, abort, second = fake.calls
        assert abort.body == {"request_ids": ["r1", "generate-tokens-r1"]}
        assert (first.body["request_id"], second.body["request_id"]) == ("r1", "r1~2")


async def test_s58_a_try_that_may_still_run_is_not_repeated_when_it_cannot_be_aborted() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(breaks="before"))
        fake.say("/abort_requests", Say(status=500))
        with pytest.raises(EngineError, match="may still be at work"):
            await engine.generate(request())
        assert fake.paths(GENERATE) == [GENERATE]


async def test_s58_a_server_that_is_gone_is_tried_without_an_abort_and_named() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        await fake._runner.cleanup()
        with pytest.raises(EngineError, match=r"engine e0 \(http://127.*cannot connect.*try 3"):
            await engine.generate(request())


async def test_the_deadline_names_itself_and_leaves_nothing_running() -> None:
    limits = Limits(request_s=0.2, metrics_s=1.0)
    async with FakeServer() as fake, engine_on(fake, limits=limits) as engine:
        fake.hold = asyncio.Event()
        with pytest.raises(EngineError, match=r"within 0.2 s \(request_s\)"):
            await engine.generate(request())
        assert fake.paths() == [GENERATE, "/abort_requests"]
        await until(lambda: not fake.running)


# ---- abort


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_an_aborted_request_returns_what_it_had_sampled() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.running))
        await engine.abort("r1")
        reply = await running
        assert (reply.finish, reply.token_ids.tolist()) == ("abort", [100, 101])


async def test_aborting_what_is_not_in_flight_does_nothing() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        await engine.abort("unknown")
        assert not fake.calls


async def test_on_a_server_that_cannot_abort_the_connection_is_closed_and_the_end_is_an_abort() -> None:
    async with FakeServer(missing=("/abort_requests",)) as fake, engine_on(fake) as engine:
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.running))
        await engine.abort("r1")
        reply = await running
        assert (reply.finish, reply.token_ids.size, reply.versions) == ("abort", 0, ())
        await until(lambda: fake.dropped == 1)


async def test_an_abort_ends_a_request_that_waits_for_its_next_try() -> None:
    patient = Retry(attempts=3, first_s=30.0, most_s=30.0)
    async with FakeServer() as fake, engine_on(fake, retry=patient, limits=Limits(request_s=100)) as engine:
        fake.say(GENERATE, Say(status=503))
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.calls))
        await asyncio.sleep(0.02)
        await engine.abort("r1")
        assert (await running).finish == "abort"
        assert fake.paths(GENERATE) == [GENERATE]


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.running))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: fake.dropped == 1)
        assert engine.in_flight == 0


# ---- S-61: the pool


async def test_s61_as_many_requests_reach_the_engine_as_the_cap_allows_also_when_it_grows() -> None:
    patient = Limits(request_s=300.0)
    async with FakeServer() as fake, engine_on(fake, max_connections=400, limits=patient) as engine:
        for cap in (150, 400):
            fake.hold, fake.peak = asyncio.Event(), 0
            running = [asyncio.ensure_future(engine.generate(request(f"{cap}-{i}"))) for i in range(cap)]
            await until(lambda: len(fake.running) == cap)  # noqa: B023
            fake.hold.set()
            replies = await asyncio.gather(*running)
            assert fake.peak == cap
            assert len(replies) == cap


async def test_s61_waiting_for_a_place_is_no_engine_failure_and_holds_up_no_control_call() -> None:
    limits = Limits(request_s=0.5, metrics_s=1.0)
    async with FakeServer() as fake, engine_on(fake, max_connections=1, limits=limits) as engine:
        fake.hold = asyncio.Event()
        first = asyncio.ensure_future(engine.generate(request("first")))
        await until(lambda: bool(fake.running))
        second = asyncio.ensure_future(engine.generate(request("second")))
        await asyncio.sleep(0.3)
        assert (await engine.load()).running == 3
        fake.hold.set()
        assert (await first).finish == "length"
        fake.hold = None
        await asyncio.sleep(0.3)  # more than the deadline since it was asked for
        assert (await second).finish == "length"
