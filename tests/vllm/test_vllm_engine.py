"""The client against a real vLLM: what no fake can vouch for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from vllm_kit import (
    LIMITS,
    PROMPT,
    Reference,
    Server,
    assert_a_stream_is_the_whole,
    assert_same,
    differs,
    engine_on,
    generating,
    request,
    versions_of,
)

from paceline.engines.http import HttpEngine, Link, Retry, connect
from paceline.errors import EngineError


@pytest.fixture
async def engine(server: Server, weights: list[Path]) -> AsyncIterator[HttpEngine]:
    """Holds version 0, whatever the test before left."""
    async with engine_on(server) as engine:
        await engine.update_weights(0, str(weights[0]))
        yield engine


async def test_the_probe_sees_what_the_server_can_do(engine: HttpEngine) -> None:
    facts = engine.facts
    assert (facts.route, facts.problems) == ("/inference/v1/generate", ())
    assert facts.processed_logprobs is True
    assert (facts.has_metrics, facts.can_pause) == (True, True)
    assert (engine.info.max_model_len, engine.info.kv_tokens) == (512, 16384)
    assert engine.version == 0


async def test_a_streamed_reply_is_the_one_that_comes_whole_and_is_told_while_it_is_sampled(
    engine: HttpEngine,
) -> None:
    await assert_a_stream_is_the_whole(engine)


@pytest.mark.usefixtures("endless")
async def test_what_a_stream_has_told_is_kept_when_it_is_aborted(
    engine: HttpEngine, references: list[Reference]
) -> None:
    told: list[int] = []
    asked = msgspec.structs.replace(request(400), tell=told.extend)
    running = asyncio.ensure_future(engine.generate(asked))
    await generating(engine)
    await engine.abort(asked.request_id)
    reply = await running
    assert reply.finish == "abort"
    assert 0 < len(reply.token_ids) < 400
    assert reply.token_ids[: len(told)].tolist() == told
    assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
async def test_ids_and_logprobs_are_those_of_a_forward_pass(
    engine: HttpEngine, references: list[Reference], temperature: float
) -> None:
    prompts = [PROMPT[: 9 + 7 * i] for i in range(6)]
    sent = [request(48, prompt, temperature=temperature, seed=i) for i, prompt in enumerate(prompts)]
    replies = await asyncio.gather(*(engine.generate(one) for one in sent))
    found = np.concatenate([reply.logprobs for reply in replies])
    expected = [
        references[0].logprobs(p, r.token_ids, temperature) for p, r in zip(prompts, replies, strict=True)
    ]
    assert_same(found, np.concatenate(expected))
    assert {reply.finish for reply in replies} <= {"stop", "length"}


@pytest.mark.usefixtures("endless")
async def test_an_aborted_request_keeps_its_tokens_and_goes_on_from_them(
    engine: HttpEngine, references: list[Reference]
) -> None:
    whole = request(400)
    running = asyncio.ensure_future(engine.generate(whole))
    await generating(engine)
    await engine.abort(whole.request_id)
    first = await running
    assert first.finish == "abort"
    assert 0 < len(first.token_ids) < 400
    context = np.concatenate([PROMPT, first.token_ids])
    second = await engine.generate(request(20, context))
    assert second.cached_tokens > len(PROMPT) - 32
    assert_same(
        np.concatenate([first.logprobs, second.logprobs]),
        references[0].logprobs(PROMPT, np.concatenate([first.token_ids, second.token_ids])),
    )


@pytest.mark.usefixtures("endless")
async def test_a_call_that_is_cancelled_here_stops_there(engine: HttpEngine) -> None:
    running = asyncio.ensure_future(engine.generate(request(400)))
    await generating(engine)
    running.cancel()
    async with asyncio.timeout(20):
        while (await engine.load()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("endless")
async def test_weights_that_change_under_a_request_are_stamped_where_they_changed(
    engine: HttpEngine, weights: list[Path], references: list[Reference]
) -> None:
    before = await engine.generate(request(16, temperature=0.0, salt="v0"))
    running = asyncio.ensure_future(engine.generate(request(400, temperature=1.0, salt="v0")))
    await generating(engine)
    await engine.update_weights(1, str(weights[1]))
    after = await engine.generate(request(16, temperature=0.0, salt="v1"))
    reply = await running

    assert not np.array_equal(before.token_ids, after.token_ids)
    assert_same(after.logprobs, references[1].logprobs(PROMPT, after.token_ids))
    assert differs(after.logprobs, references[0].logprobs(PROMPT, after.token_ids))

    assert versions_of(reply) == [0, 1]
    (_, old), (_, new) = reply.versions
    assert old + new == len(reply.token_ids)
    under_old = references[0].logprobs(PROMPT, reply.token_ids)
    under_new = references[1].logprobs(PROMPT, reply.token_ids)
    assert_same(reply.logprobs[:old], under_old[:old])
    assert_same(reply.logprobs[old:], under_new[old:])  # its KV was computed anew: not a mixture
    assert differs(reply.logprobs[old:], under_old[old:])


@pytest.mark.usefixtures("endless")
async def test_interrupted_requests_keep_their_tokens_and_go_on_under_the_new_weights(
    server: Server, weights: list[Path], references: list[Reference]
) -> None:
    async with engine_on(server, interrupt=True) as engine:
        await engine.update_weights(0, str(weights[0]))
        running = [
            asyncio.ensure_future(engine.generate(request(400, salt="v0", seed=seed))) for seed in range(4)
        ]
        await generating(engine)
        await engine.update_weights(1, str(weights[1]))
        for seed, reply in enumerate(await asyncio.gather(*running)):
            assert (reply.finish, versions_of(reply)) == ("abort", [0])
            assert 0 < len(reply.token_ids) < 400
            assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))
            context = np.concatenate([PROMPT, reply.token_ids])
            rest = await engine.generate(request(20, context, salt="v1", seed=seed))
            assert versions_of(rest) == [1]
            assert_same(rest.logprobs, references[1].logprobs(context, rest.token_ids))


@pytest.mark.usefixtures("endless")
async def test_three_versions_in_one_request(
    engine: HttpEngine, weights: list[Path], references: list[Reference]
) -> None:
    running = asyncio.ensure_future(engine.generate(request(400, salt="v0")))
    for version in (1, 2):
        await generating(engine)
        await engine.update_weights(version, str(weights[version]))
    reply = await running
    assert versions_of(reply) == [0, 1, 2]
    at = 0
    for version, count in reply.versions:
        under = references[version].logprobs(PROMPT, reply.token_ids)
        assert_same(reply.logprobs[at : at + count], under[at : at + count])
        at += count


async def test_cached_prefixes_are_shared_within_a_version_and_never_across(
    engine: HttpEngine, weights: list[Path], references: list[Reference]
) -> None:
    first = await engine.generate(request(4, salt="v0"))
    again = await engine.generate(request(4, salt="v0"))
    other = await engine.generate(request(4, salt="v1"))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 64, 0)
    await engine.update_weights(1, str(weights[1]))
    fresh = await engine.generate(request(4, salt="v1"))
    assert fresh.cached_tokens == 0  # what "other" left was computed by the old weights
    assert_same(fresh.logprobs, references[1].logprobs(PROMPT, fresh.token_ids))


async def test_a_paused_server_holds_requests_and_is_told_of_at_the_start(
    engine: HttpEngine, server: Server
) -> None:
    link = Link(server.url, "e0", LIMITS, Retry())
    try:
        await link.demand("POST", "/pause?mode=keep&clear_cache=false")
        held = asyncio.ensure_future(engine.generate(request(4)))
        done, _ = await asyncio.wait((held,), timeout=1.0)
        assert not done
        with pytest.raises(EngineError, match=r"is paused.*POST /resume"):
            async with engine_on(server):
                pass
    finally:
        await link.demand("POST", "/resume")
        await link.close()
    assert len((await held).token_ids) == 4


@pytest.mark.usefixtures("endless")
async def test_a_call_is_stopped_with_its_tokens_while_the_server_is_paused(
    engine: HttpEngine, server: Server, references: list[Reference]
) -> None:
    """What is done when a load fails: nothing may be sampled before the calls are stopped."""
    link = Link(server.url, "e0", LIMITS, Retry())
    try:
        running = asyncio.ensure_future(engine.generate(request(400)))
        await generating(engine)
        await link.demand("POST", "/pause?mode=keep&clear_cache=true")
        async with asyncio.timeout(20):
            await engine.interrupt()
            reply = await running
    finally:
        await link.demand("POST", "/resume")
        await link.close()
    assert reply.finish == "abort"
    assert 0 < len(reply.token_ids) < 400
    assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))


async def test_a_wrong_name_is_refused_with_the_right_one(server: Server) -> None:
    with pytest.raises(EngineError, match=r"serves no model 'llama' \(it serves: policy\)"):
        await connect(server.url, id="e0", served_name="llama", limits=LIMITS, start_s=30.0)


async def test_what_the_server_cannot_take_is_an_error_and_not_a_shorter_answer(engine: HttpEngine) -> None:
    with pytest.raises(EngineError, match="answered 400"):
        await engine.generate(request(4, np.full(600, 65)))
    with pytest.raises(EngineError, match="answered 400"):
        await engine.generate(request(4, [1, 100_000]))
