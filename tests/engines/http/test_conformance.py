"""What every engine client owes the runtime, whatever the server behind it: one set of cases for all of them.

`vllm`, `completions` and `sglang` run against scripted servers, which do what a real one will not do on demand;
`embedded` is the real thing, in a process of its own, and takes part where nothing has to be scripted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import COMPLETIONS, GENERATE, FakeServer, Say
from fake_sglang import FakeSglang
from test_http_embedded import make_model
from test_http_generate import LIMITS, QUICK, until

from paceline.engines import sglang
from paceline.engines.http import HttpEngine, Limits, connect
from paceline.errors import EngineBusy, EngineError, ImpossibleLogprobs
from paceline.ports import GenerateRequest, SamplingParams
from paceline.runtime.processes import ChildProcess
from paceline.runtime.weight_check import ProbeCheck
from paceline.transport.probes import read_probes


def vllm_reply(ids: Any, logprobs: Any, finish: str = "length") -> dict[str, Any]:
    entries = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
    return {"choices": [{"token_ids": ids, "logprobs": entries, "finish_reason": finish}]}


def completions_reply(ids: Any, logprobs: Any, finish: str = "length") -> dict[str, Any]:
    entries = None if logprobs is None else {"token_logprobs": logprobs}
    return {"choices": [{"token_ids": ids, "logprobs": entries, "finish_reason": finish}]}


def sglang_reply(ids: Any, logprobs: Any, finish: str = "length") -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": {"type": finish}, "weight_version": "default"}
    if logprobs is not None:
        named = ids if ids is not None and len(ids) == len(logprobs) else range(100, 100 + len(logprobs))
        meta["output_token_logprobs"] = [[lp, i, None] for lp, i in zip(logprobs, named, strict=True)]
    return {"text": "…", "output_ids": ids, "meta_info": meta}


@dataclass(frozen=True)
class Kind:
    """One client and the scripted server it is tried on."""

    serve: Callable[[], Any]
    reach: Callable[..., Any]
    route: str
    reply: Callable[..., dict[str, Any]]
    abort: str
    load: str
    """The route that takes weights."""
    pause: str
    resume: str


KINDS = {
    "vllm": Kind(
        FakeServer, connect, GENERATE, vllm_reply, "/abort_requests", "/update_weights", "/pause", "/resume"
    ),
    "completions": Kind(
        lambda: FakeServer(missing=(GENERATE,)),
        connect,
        COMPLETIONS,
        completions_reply,
        "/abort_requests",
        "/update_weights",
        "/pause",
        "/resume",
    ),
    "sglang": Kind(
        FakeSglang,
        sglang.connect,
        sglang.ROUTE,
        sglang_reply,
        "/abort_request",
        "/update_weights_from_disk",
        "/pause_generation",
        "/continue_generation",
    ),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@asynccontextmanager
async def both(kind: Kind, **options: Any) -> AsyncIterator[tuple[Any, HttpEngine]]:
    async with kind.serve() as fake:
        options = {"limits": LIMITS, "retry": QUICK, "start_s": 5.0} | options
        engine = await kind.reach(fake.url, id="e0", served_name="policy", **options)
        fake.calls.clear()
        fake.peak = 0
        try:
            yield fake, engine
        finally:
            await engine.close()


def ask(name: str = "r1", tokens: int = 4, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.5, stop_token_ids=(7,), seed=3)
    return GenerateRequest(name, np.arange(1, 5, dtype=np.int32), sampling, **more)


# ---- a healthy server


async def test_ids_logprobs_versions_and_cached_tokens_come_back(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        reply = await engine.generate(ask(session="g0", cache_salt="v3"))
        (call,) = fake.calls
    assert reply.token_ids.tolist() == [100, 101, 102, 103]
    assert reply.logprobs.tolist() == [-1.0] * 4
    assert (reply.token_ids.dtype, reply.logprobs.dtype) == (np.int32, np.float32)
    assert not reply.token_ids.flags.writeable
    assert not reply.logprobs.flags.writeable
    assert (reply.finish, reply.versions, reply.cached_tokens) == ("length", ((0, 4),), 3)
    assert call.path == kind.route
    assert call.headers["X-Session-ID"] == "g0"
    assert "v3" in (call.body.get("cache_salt"), call.body.get("extra_key"))


async def test_what_the_server_can_do_is_known_at_the_start(kind: Kind) -> None:
    async with both(kind) as (_, engine):
        facts = engine.facts
        assert (facts.route, facts.problems, facts.processed_logprobs) == (kind.route, (), True)
        assert (facts.has_metrics, facts.can_pause) == (True, True)
        assert (engine.info.kv_tokens, engine.info.max_model_len, engine.version) == (8192, 4096, 0)
        load = await engine.load()
        assert (load.running, load.waiting, load.kv_usage, load.preemptions) == (3, 2, 0.25, 1)
        assert (load.prefix_queries, load.prefix_hits, load.generated_tokens) == (1000, 640, 12345)


async def test_an_aborted_request_returns_what_it_had(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        await engine.abort("r1")
        reply = await running
    assert (reply.finish, reply.token_ids.tolist()) == ("abort", [100, 101])
    assert fake.paths() == [kind.route, kind.abort]


async def test_new_weights_flip_the_version_between_pause_and_resume(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        await engine.update_weights(7, "/weights/v7")
        assert (fake.loaded, fake.label, fake.paused, engine.version) == ("/weights/v7", "v7", False, 7)
        order = fake.paths(kind.pause, kind.load, kind.resume)
        assert order == [kind.pause, kind.load, kind.resume]
        assert (await engine.generate(ask())).versions == ((7, 4),)


async def test_a_request_across_an_update_never_claims_to_be_newer_than_it_is(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        await engine.update_weights(1, "/weights/v1")
        fake.hold.set()
        versions = (await running).versions
    assert versions in (((0, 2), (1, 2)), ((0, 4),))


async def test_as_many_calls_are_in_flight_as_are_allowed(kind: Kind) -> None:
    async with both(kind, max_connections=24) as (fake, engine):
        fake.hold = asyncio.Event()
        running = [asyncio.ensure_future(engine.generate(ask(f"r{i}"))) for i in range(40)]
        await until(lambda: len(fake.running) == 24)
        fake.hold.set()
        assert len(await asyncio.gather(*running)) == 40
        assert fake.peak == 24


# ---- a server that is slow, broken or wrong


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish", "complaint"),
    [
        (None, None, "length", "did not return token ids"),
        ([5, 6], None, "length", "2 token ids and no logprobs"),
        ([5], [-0.1, -0.2], "length", "ids"),
        ([5, -6], [-0.1, -0.2], "length", "token id -6 at position 1"),
        ([5, 6], [-0.1, None], "length", "logprob null at position 1"),
        ([5, 6], [-0.1, 0.3], "length", "logprob 0.3 at position 1"),
        ([5, 6], [-0.1, -9999.0], "length", "logprob -9999.0 at position 1"),
        ([5, 6], [-0.1, -0.2], "mystery", "mystery"),
    ],
)
async def test_a_reply_that_cannot_be_trained_on_is_an_error_that_says_why(
    kind: Kind, ids: Any, logprobs: Any, finish: str, complaint: str
) -> None:
    async with both(kind) as (fake, engine):
        fake.say(kind.route, Say(body=kind.reply(ids, logprobs, finish)))
        with pytest.raises(EngineError, match=complaint) as caught:
            await engine.generate(ask())
        assert fake.url in str(caught.value)
        assert len(fake.calls) == 1
        assert (await engine.generate(ask("next"))).token_ids.size == 4


@pytest.mark.parametrize(
    ("value", "said"), [("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("null", "null")]
)
async def test_s89_a_logprob_that_is_no_number_is_an_error_with_its_place(
    kind: Kind, value: str, said: str
) -> None:
    async with both(kind) as (fake, engine):
        body = json.dumps(kind.reply([5, 6], [-0.125, -0.25])).replace("-0.25", value)
        fake.say(kind.route, Say(body=body.encode()))
        with pytest.raises(ImpossibleLogprobs, match=rf"logprob {said} at position 1 of 2") as caught:
            await engine.generate(ask())
        assert (caught.value.bad, caught.value.tokens) == (1, 2)
        assert fake.url in str(caught.value)
        assert len(fake.calls) == 1, "the same seed would sample it again"


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[" * 10_000, b"\x80\x04pickle", b'{"choices": 3, "meta_info": 3}']
)
async def test_any_bytes_are_an_engine_error_and_nothing_else(kind: Kind, body: bytes) -> None:
    async with both(kind) as (fake, engine):
        fake.say(kind.route, Say(body=body))
        with pytest.raises(EngineError):
            await engine.generate(ask())


async def test_a_storm_of_429_is_waited_out_and_answers_each_request_once(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        fake.say(kind.route, *[Say(status=429)] * 16)
        replies = await asyncio.gather(
            *(engine.generate(ask(f"r{i}")) for i in range(32)), return_exceptions=True
        )
        done = [reply for reply in replies if not isinstance(reply, BaseException)]
        failed = [reply for reply in replies if isinstance(reply, BaseException)]
        # Of the kind that is a reason to ask later, which whoever asked does.
        assert all(isinstance(error, EngineBusy) and "429" in str(error) for error in failed)
        assert len(fake.paths(kind.route)) == 16 + len(done)


@pytest.mark.parametrize("breaks", ["before", "middle"])
async def test_half_a_reply_is_aborted_there_before_it_is_asked_for_again(kind: Kind, breaks: Any) -> None:
    async with both(kind) as (fake, engine):
        fake.say(kind.route, Say(breaks=breaks))
        assert (await engine.generate(ask())).token_ids.size == 4
        assert fake.paths() == [kind.route, kind.abort, kind.route]
        names = [call.body.get("request_id") or call.body.get("rid") for call in fake.calls[::2]]
        assert names == ["r1", "r1~2"]


async def test_a_slow_server_costs_its_deadline_and_no_more(kind: Kind) -> None:
    async with both(kind, limits=Limits(request_s=0.2, metrics_s=0.5)) as (fake, engine):
        fake.say(kind.route, Say(until=asyncio.Event()))
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer within 0.2 s \(request_s\)"):
            await engine.generate(ask())
        assert time.monotonic() - began < 2
        assert fake.paths(kind.abort) == [kind.abort]


async def test_metrics_that_hang_are_an_error_in_time_and_delay_nothing_else(kind: Kind) -> None:
    async with both(kind, limits=Limits(metrics_s=0.1)) as (fake, engine):
        fake.say("/metrics", Say(until=asyncio.Event()))
        load = asyncio.ensure_future(engine.load())
        assert (await engine.generate(ask())).token_ids.size == 4
        with pytest.raises(EngineError, match=r"/metrics gave no answer within 0\.1 s"):
            await load
    async with both(kind) as (fake, engine):
        fake.say("/metrics", Say(body=b"up 1\n"))
        with pytest.raises(EngineError, match="/metrics page has no"):
            await engine.load()


async def test_a_version_that_goes_backwards_after_a_load_is_not_believed(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        await engine.update_weights(3, "/weights/v3")
        where = "/weight_info" if kind.reach is connect else "/get_weight_version"
        fake.say(where, Say(body={"weight_version": "v2"}))
        with pytest.raises(EngineError, match=r"was given v4 .* but says it holds v2"):
            await engine.update_weights(4, "/weights/v4")
        assert (engine.version, fake.paused) == (3, False)


@pytest.mark.parametrize("status", [400, 500])
async def test_a_load_that_fails_resumes_the_server_and_flips_nothing(kind: Kind, status: int) -> None:
    async with both(kind) as (fake, engine):
        fake.say(kind.load, *[Say(status=status, body={"error": {"message": "no such directory"}})] * 3)
        with pytest.raises(EngineError, match=f"engine e0.*{kind.load}.*no such directory"):
            await engine.update_weights(1, "/weights/v1")
        assert (engine.version, fake.paused) == (0, False)


@pytest.mark.parametrize(
    ("token", "logprob", "agrees"), [(100, -0.45, True), (100, -1.5, False), (7, -0.5, False)]
)
async def test_a_server_that_took_weights_and_serves_others_is_found_out(
    kind: Kind, tmp_path: Path, token: int, logprob: float, agrees: bool
) -> None:
    (tmp_path / "model.safetensors").touch()
    probes = [{"token_ids": [5, 6, n], "next": [[token, logprob], [8, -2.0]]} for n in range(4)]
    (tmp_path / "probe.json").write_text(json.dumps({"probes": probes}))
    async with both(kind, check=ProbeCheck(0.15, read_probes)) as (fake, engine):
        if agrees:
            await engine.update_weights(1, str(tmp_path))
        else:
            with pytest.raises(
                EngineError, match=r"engine e0 took v1 from .* and does not serve it: .*trainer"
            ):
                await engine.update_weights(1, str(tmp_path))
        # The server says v1 either way.
        assert (fake.label, fake.paused, engine.version) == ("v1", False, 1 if agrees else 0)


async def test_a_wrong_model_name_is_refused_with_the_right_one(kind: Kind) -> None:
    async with kind.serve() as fake:
        with pytest.raises(EngineError, match=r"serves no model 'llama' \(it serves: policy\)"):
            await kind.reach(fake.url, id="e0", served_name="llama", limits=LIMITS, start_s=2.0)


# ---- SGLang alone


async def test_sglang_that_says_in_its_body_that_a_load_failed_is_believed() -> None:
    kind = KINDS["sglang"]
    async with both(kind) as (fake, engine):
        fake.say(kind.load, Say(body={"success": False, "message": "shape mismatch"}))
        with pytest.raises(EngineError, match="did not succeed: shape mismatch"):
            await engine.update_weights(1, "/weights/v1")
        assert (engine.version, fake.paused) == (0, False)


async def test_sglang_that_names_one_version_at_the_end_gets_the_older_of_two() -> None:
    async with FakeSglang(spans=False) as fake:
        engine = await sglang.connect(fake.url, id="e0", served_name="policy", limits=LIMITS, start_s=5.0)
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        await engine.update_weights(1, "/weights/v1")
        fake.hold.set()
        assert (await running).versions == ((0, 4),)
        assert (await engine.generate(ask("next"))).versions == ((1, 4),)
        await engine.close()


async def test_sglang_whose_ids_are_not_those_of_its_logprobs_is_refused() -> None:
    kind = KINDS["sglang"]
    async with both(kind) as (fake, engine):
        reply = sglang_reply([5, 6], [-0.1, -0.2])
        reply["output_ids"] = [5, 9]
        fake.say(kind.route, Say(body=reply))
        with pytest.raises(EngineError, match="output_ids are not the 2 ids of its logprobs"):
            await engine.generate(ask())


async def test_sglang_that_gives_a_request_up_is_an_error_and_no_abort() -> None:
    kind = KINDS["sglang"]
    async with both(kind) as (fake, engine):
        reply = sglang_reply([], [], "abort")
        reply["meta_info"]["finish_reason"] |= {"status_code": 503, "message": "queue is full"}
        fake.say(kind.route, Say(body=reply))
        with pytest.raises(EngineError, match=r"gave the request up \(503\): queue is full"):
            await engine.generate(ask())


# ---- the real thing


@pytest.mark.torch
async def test_the_embedded_engine_keeps_the_same_promises(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m0", 0), make_model(tmp_path / "m1", 1)
    command = [sys.executable, "-m", "paceline.engines.embedded", "--model", model[0], "--kv-tokens", "8192"]
    async with AsyncExitStack() as stack:
        server = await ChildProcess.start(command, name="engine-0", log_path=tmp_path / "log")
        stack.push_async_callback(server.close)
        engine = await connect(server.ready["url"], id="e0", served_name="policy", limits=Limits())
        stack.push_async_callback(engine.close)
        reply = await engine.generate(ask(cache_salt="v0"))
        assert len(reply.token_ids) == len(reply.logprobs) <= 4
        prompt = np.arange(2, 66, dtype=np.int32)
        long = GenerateRequest("long", prompt, SamplingParams(max_tokens=3000, seed=11))
        running = asyncio.ensure_future(engine.generate(long))
        async with asyncio.timeout(20):
            while not (await engine.load()).running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await engine.abort("long")
        aborted = await running
        assert aborted.finish == "abort"
        assert len(aborted.token_ids) == len(aborted.logprobs) < 3000
        await engine.update_weights(1, model[1])
        assert {v for v, _ in (await engine.generate(ask("new", cache_salt="v1"))).versions} == {1}
        too_long = GenerateRequest("too-long", np.full(5000, 5, np.int32), SamplingParams(max_tokens=4))
        with pytest.raises(EngineError, match="answered 400"):
            await engine.generate(too_long)
