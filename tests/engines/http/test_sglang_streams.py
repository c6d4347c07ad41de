"""SGLang's streams: what is sampled is told while it is, and the reply is the one that comes whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_server import Say
from fake_sglang import FakeSglang
from test_http_generate import LIMITS, QUICK, request
from test_http_streams import facts

from paceline.engines import sglang
from paceline.engines.http import HttpEngine
from paceline.errors import EngineError
from paceline.ports import GenerateReply

ROUTE = sglang.ROUTE


@asynccontextmanager
async def engine_on(fake: FakeSglang) -> AsyncIterator[HttpEngine]:
    engine = await sglang.connect(
        fake.url, id="e0", served_name="policy", limits=LIMITS, retry=QUICK, start_s=5.0
    )
    fake.calls.clear()
    try:
        yield engine
    finally:
        await engine.close()


def event(ids: list[int] | None, total: int, *, finish: Any = None, **meta: Any) -> dict[str, Any]:
    entries = None if ids is None else [[-0.5, token, None] for token in ids]
    told = {"finish_reason": finish, "completion_tokens": total, "output_token_logprobs": entries}
    return {"text": "…", "output_ids": ids, "meta_info": {"weight_version": "default", **told, **meta}}


async def heard(*events: Any) -> tuple[GenerateReply, list[list[int]], FakeSglang]:
    """The reply to a request that is answered with these events, and what of it was told."""
    told: list[list[int]] = []
    raw = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"
    async with FakeSglang() as fake, engine_on(fake) as engine:
        fake.say(ROUTE, Say(body=raw, headers={"Content-Type": "text/event-stream"}))
        reply = await engine.generate(request(tell=lambda ids: told.append(list(ids))))
    return reply, told, fake


@pytest.mark.parametrize("spans", [True, False])
async def test_a_streamed_reply_is_the_one_that_comes_whole(spans: bool) -> None:
    told: list[list[int]] = []
    async with FakeSglang(spans=spans) as fake, engine_on(fake) as engine:
        whole = await engine.generate(request("a"))
        streamed = await engine.generate(request("b", tell=lambda ids: told.append(list(ids))))
        calls = [call.body["stream"] for call in fake.calls if call.path == ROUTE]
    assert facts(streamed) == facts(whole)
    assert (streamed.token_ids.dtype, streamed.token_ids.flags.writeable) == (np.int32, False)
    assert told == [[100], [101], [102], [103]]
    assert calls == [False, True]


async def test_one_whose_events_would_repeat_the_answer_is_not_asked_for_a_stream() -> None:
    told: list[int] = []
    async with FakeSglang(incremental=False) as fake, engine_on(fake) as engine:
        reply = await engine.generate(request(tell=told.extend))
        assert [call.body["stream"] for call in fake.calls if call.path == ROUTE] == [False]
    assert (reply.token_ids.tolist(), told) == ([100, 101, 102, 103], [])


@pytest.mark.parametrize("breaks", ["middle", "event"])
async def test_what_a_broken_stream_has_told_is_kept_and_its_request_is_stopped_not_repeated(
    breaks: Any,
) -> None:
    told: list[int] = []
    async with FakeSglang() as fake, engine_on(fake) as engine:
        fake.say(ROUTE, Say(breaks=breaks))
        reply = await engine.generate(request(tell=told.extend))
        assert (fake.paths(ROUTE), "/abort_request" in fake.paths()) == ([ROUTE], True)
    assert (reply.token_ids.tolist(), reply.finish, reply.versions) == ([100, 101], "abort", ((0, 2),))
    assert told == [100, 101]


async def test_events_that_the_server_has_put_together_are_told_as_one() -> None:
    reply, told, _ = await heard(event([5], 1), event([6, 7], 3, finish={"type": "stop", "matched": 7}))
    assert (reply.token_ids.tolist(), reply.stop_reason, told) == ([5, 6, 7], 7, [[5], [6, 7]])


async def test_a_request_that_is_aborted_while_it_waits_again_says_all_it_had_and_nothing_is_told_twice() -> (
    None
):
    # Retracted after two tokens, and aborted in the queue: the last event repeats both, and one id.
    last = event([5, 6], 2, finish={"type": "abort", "message": "Abort in waiting queue"})
    reply, told, _ = await heard(event([5], 1), event([6], 2), last | {"output_ids": [6]})
    assert (reply.token_ids.tolist(), reply.finish, told) == ([5, 6], "abort", [[5], [6]])


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([event([5], 1), event([7], 3)], "gave 1 logprobs after 1 tokens, and says that there are 3"),
        ([event(None, 1) | {"output_ids": [5]}], "1 token ids and no logprobs"),
        ([event([5], 1) | {"output_ids": [6]}], "output_ids after 0 tokens are not those of its logprobs"),
        ([{"text": "hello"}], "did not return token ids"),
        ([{"meta_info": {"output_token_logprobs": "none"}}], "stream cannot be read"),
        ([event([5], 1, finish={"type": "abort", "message": "bad", "status_code": 400})], r"up \(400\): bad"),
        ([{"error": {"message": "too long", "code": 400}}], r"up \(400\): too long"),
    ],
)
async def test_s27_a_part_that_is_not_token_exact_is_refused_by_name(events: list[Any], why: str) -> None:
    with pytest.raises(EngineError, match=why):
        await heard(*events)


async def test_s89_an_impossible_logprob_of_a_stream_is_an_error_with_its_position() -> None:
    last = event([6], 2, finish={"type": "stop"})
    last["meta_info"]["output_token_logprobs"] = [[-9999.0, 6, None]]
    with pytest.raises(EngineError, match=r"logprob -9999.0 at position 1 of 2"):
        await heard(event([5], 1), last)


@pytest.mark.parametrize("ids", [[], [5]])
async def test_a_queue_that_is_full_is_asked_again_and_what_was_told_is_not(ids: list[int]) -> None:
    full = {"type": "abort", "message": "queue is full", "status_code": 503}
    reply, told, fake = await heard(event(ids, len(ids), finish=full))
    if ids:
        assert (reply.token_ids.tolist(), reply.finish, told) == ([5], "abort", [[5]])
        assert fake.paths(ROUTE) == [ROUTE]
    else:
        assert (reply.token_ids.tolist(), fake.paths(ROUTE)) == ([100, 101, 102, 103], [ROUTE] * 2)
