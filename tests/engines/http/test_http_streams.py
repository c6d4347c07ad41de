"""What is sampled can be told while it is; the reply is then the one that comes whole, and what was told is kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fake_server import COMPLETIONS, GENERATE, FakeServer, Say
from test_http_generate import engine_on, request

from paceline.engines.http.link import LinkLost
from paceline.engines.http.streams import Heard
from paceline.errors import EngineError
from paceline.ports import GenerateReply


def facts(reply: GenerateReply) -> tuple[object, ...]:
    return (
        reply.token_ids.tolist(),
        reply.logprobs.tolist(),
        *(reply.finish, reply.versions, reply.cached_tokens, reply.stop_reason),
    )


@pytest.mark.parametrize("missing", [(), (GENERATE,)])
async def test_a_streamed_reply_is_the_one_that_comes_whole_on_both_routes(missing: tuple[str, ...]) -> None:
    told: list[list[int]] = []
    async with FakeServer(missing=missing) as fake, engine_on(fake) as engine:
        whole = await engine.generate(request("a"))
        streamed = await engine.generate(request("b", tell=lambda ids: told.append(list(ids))))
        calls = [call for call in fake.calls if call.path in (GENERATE, COMPLETIONS)]
    assert facts(streamed) == facts(whole)
    assert (streamed.token_ids.dtype, streamed.token_ids.flags.writeable) == (np.int32, False)
    assert told == [[100], [101], [102], [103]]
    assert ["stream" in call.body for call in calls] == [False, True]


async def test_a_server_that_answers_whole_is_read_as_ever_and_tells_nothing() -> None:
    told: list[int] = []
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.streams = False
        reply = await engine.generate(request(tell=told.extend))
    assert (reply.token_ids.tolist(), told) == ([100, 101, 102, 103], [])


@pytest.mark.parametrize("breaks", ["middle", "event"])
async def test_what_a_broken_stream_has_told_is_kept_and_its_request_is_stopped_not_repeated(
    breaks: str,
) -> None:
    told: list[int] = []
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(breaks=breaks))  # type: ignore[arg-type]
        reply = await engine.generate(request(tell=told.extend))
        assert fake.paths(GENERATE) == [GENERATE]
        assert "/abort_requests" in fake.paths()
    assert (reply.token_ids.tolist(), reply.finish, reply.versions) == ([100, 101], "abort", ((0, 2),))
    assert told == [100, 101]


async def test_a_stream_that_breaks_before_its_first_token_is_asked_for_again() -> None:
    told: list[int] = []
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(GENERATE, Say(breaks="before"))
        reply = await engine.generate(request(tell=told.extend))
        assert fake.paths(GENERATE) == [GENERATE, GENERATE]
    assert reply.token_ids.tolist() == told == [100, 101, 102, 103]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"token_ids": [5], "logprobs": None}, "1 token ids and 0 logprobs after 0 tokens"),
        ({"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}]}}, "2 token ids and 1 logprobs"),
        ({"token_ids": [], "logprobs": {"token_logprobs": [-1.0]}}, "0 token ids and 1 logprobs"),
        ({"token_ids": "five"}, "stream cannot be read"),
        ({"text": "hello"}, "did not return token ids: it must honour `return_token_ids`"),
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, "did not return token ids"),
    ],
)
async def test_s27_a_part_that_is_not_token_exact_is_refused_by_name(
    part: dict[str, object], why: str
) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        raw = b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n"
        fake.streams = False
        fake.say(GENERATE, Say(body=raw, headers={"Content-Type": "text/event-stream"}))
        with pytest.raises(EngineError, match=why):
            await engine.generate(request(tell=lambda ids: None))


@pytest.mark.parametrize("ids", [None, []])
async def test_a_stream_that_never_names_ids_is_no_empty_answer(ids: list[int] | None) -> None:
    def reply(body: object) -> dict[str, object]:
        return {"choices": [{"token_ids": ids, "finish_reason": "stop"}]}

    async with FakeServer() as fake, engine_on(fake) as engine:
        raw = b"data: " + json.dumps(reply(None)).encode() + b"\n\ndata: [DONE]\n\n"
        fake.streams = False
        fake.say(GENERATE, Say(body=raw, headers={"Content-Type": "text/event-stream"}))
        asked = engine.generate(request(tell=lambda ids: None))
        if ids is None:
            with pytest.raises(EngineError, match="did not return token ids"):
                await asked
        else:
            assert (await asked).finish == "stop"


@pytest.mark.parametrize(
    "said", [{"message": "out of\nmemory " + 5000 * "x"}, "out of\nmemory " + 5000 * "x"]
)
def test_what_a_server_says_as_it_breaks_a_stream_off_is_told_in_one_short_line(said: object) -> None:
    heard = Heard(lambda ids: None, spans=True)
    with pytest.raises(LinkLost) as lost:
        heard.take(json.dumps({"error": said}).encode())
    text = str(lost.value)
    assert text.startswith("it broke the stream off: out of memory xxx")
    assert len(text) < 300


async def test_s89_an_impossible_logprob_of_a_stream_is_an_error_with_its_position() -> None:
    def reply(body: object) -> dict[str, object]:
        entries = [{"logprob": -1.0}, {"logprob": -9999.0}]
        return {"choices": [{"token_ids": [5, 6], "logprobs": {"content": entries}, "finish_reason": "stop"}]}

    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.reply = reply
        with pytest.raises(EngineError, match=r"logprob -9999.0 at position 1 of 2"):
            await engine.generate(request(tell=lambda ids: None))
