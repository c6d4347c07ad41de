"""Chat endpoints as services: text in and out, tried again only where nothing was done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_server import FakeServer, Say

from paceline.cli.services import ConfiguredServices
from paceline.config import ChatSection, RunConfig
from paceline.config.load import load
from paceline.engines.http import Retry
from paceline.engines.openai_chat import OpenAIChat
from paceline.errors import ConfigError, EngineError
from paceline.ports import ChatReply

ROUTE = "/v1/chat/completions"
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1},
}
MESSAGES = [{"role": "user", "content": "2+2?"}]


@asynccontextmanager
async def chat_on(fake: FakeServer, **options: Any) -> AsyncIterator[OpenAIChat]:
    options = {"retry": Retry(attempts=3, first_s=0.01, most_s=0.02)} | options
    chat = OpenAIChat(f"{fake.url}/v1", "some-model", **options)
    try:
        yield chat
    finally:
        await chat.close()


@pytest.mark.parametrize("request_", ["2+2?", MESSAGES, {"messages": MESSAGES}])
async def test_a_service_may_be_asked_with_a_string_messages_or_a_dictionary(request_: Any) -> None:
    async with FakeServer() as fake, chat_on(fake, api_key="sk-1", options={"temperature": 0.2}) as chat:
        fake.say(ROUTE, Say(body=ANSWER))
        assert await chat(request_) == ChatReply("4", "stop", 9, 1)
        (call,) = fake.calls
    assert call.body == {"model": "some-model", "temperature": 0.2, "messages": MESSAGES, "stream": False}
    assert call.headers["Authorization"] == "Bearer sk-1"


async def test_options_of_a_request_go_over_those_of_the_endpoint() -> None:
    async with FakeServer() as fake, chat_on(fake, options={"temperature": 0.2, "top_p": 1.0}) as chat:
        fake.say(ROUTE, Say(body=ANSWER))
        await chat({"messages": MESSAGES, "temperature": 0.0, "max_tokens": 5})
        (call,) = fake.calls
    assert (call.body["temperature"], call.body["top_p"], call.body["max_tokens"]) == (0.0, 1.0, 5)


@pytest.mark.parametrize("status", [429, 503])
async def test_an_endpoint_that_is_busy_is_asked_again(status: int) -> None:
    async with FakeServer() as fake, chat_on(fake) as chat:
        fake.say(ROUTE, Say(status=status), Say(status=status), Say(body=ANSWER))
        assert (await chat("2+2?")).text == "4"
        assert len(fake.calls) == 3


@pytest.mark.parametrize(
    "say", [Say(status=500), Say(status=400), Say(breaks="middle", body=ANSWER), Say(until=asyncio.Event())]
)
async def test_a_call_that_the_endpoint_may_have_worked_on_is_never_made_twice(say: Say) -> None:
    async with FakeServer() as fake, chat_on(fake, request_s=0.2) as chat:
        fake.say(ROUTE, say, Say(body=ANSWER))
        with pytest.raises(EngineError, match="chat some-model"):
            await chat("2+2?")
        assert len(fake.calls) == 1


async def test_a_refused_key_names_the_option_and_not_the_key() -> None:
    async with FakeServer() as fake, chat_on(fake, api_key="sk-secret") as chat:
        fake.say(ROUTE, Say(status=401))
        with pytest.raises(EngineError, match="api_key_env") as caught:
            await chat("2+2?")
        assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"choices": []}, "no choices"),
        (
            {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]},
            "no text .*'tool_calls'",
        ),
        (b"<html>", "cannot be read"),
    ],
)
async def test_an_answer_without_text_is_an_error(body: Any, complaint: str) -> None:
    async with FakeServer() as fake, chat_on(fake) as chat:
        fake.say(ROUTE, Say(body=body))
        with pytest.raises(EngineError, match=complaint):
            await chat("2+2?")


async def test_what_is_no_request_is_refused_by_its_kind() -> None:
    async with FakeServer() as fake, chat_on(fake) as chat:
        with pytest.raises(EngineError, match="asked with a int"):
            await chat(3)


async def test_no_more_calls_are_in_flight_than_allowed() -> None:
    gate = asyncio.Event()
    async with FakeServer() as fake, chat_on(fake, max_connections=2) as chat:
        fake.say(ROUTE, *[Say(body=ANSWER, until=gate)] * 5)
        running = [asyncio.ensure_future(chat("2+2?")) for _ in range(5)]
        async with asyncio.timeout(5):
            while len(fake.calls) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(fake.calls) == 2
        gate.set()
        assert len(await asyncio.gather(*running)) == 5


async def test_an_algorithm_reaches_a_configured_endpoint_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-2")
    async with FakeServer() as fake:
        fake.say(ROUTE, Say(body=ANSWER))
        section = ChatSection(url=f"{fake.url}/v1", model="m", api_key_env="JUDGE_KEY", max_tokens=7)
        services = ConfiguredServices({}, {"judge": section})
        try:
            assert (await services.call("judge", "2+2?")).text == "4"
            with pytest.raises(ConfigError, match=r"asks for service 'teacher', configured are \['judge'\]"):
                await services.call("teacher", "2+2?")
        finally:
            await services.close()
        assert fake.calls[0].body["max_tokens"] == 7
        assert fake.calls[0].headers["Authorization"] == "Bearer sk-2"


def test_a_key_that_is_not_set_is_refused_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    section = ChatSection(url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"chat.judge.api_key_env names JUDGE_KEY, which is not set"):
        ConfiguredServices({}, {"judge": section})


def test_a_chat_endpoint_is_refused_as_the_engine_of_a_run(tmp_path: Any) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\nname = "m"\n[[env]]\nid = "reverse-text"\n[engine]\ntype = "openai_chat"\nurl = "http://x/v1"\n'
    )
    with pytest.raises(
        ConfigError, match=r"returns text, and training needs the ids and logprobs.*\[chat.NAME\]"
    ):
        load(RunConfig, [config])


async def test_s66_requests_of_a_frozen_model_share_one_cache_for_ever() -> None:
    """Its weights never change, so nothing in its requests does: whatever it has cached of a prompt stays good."""
    async with FakeServer() as fake, chat_on(fake) as chat:
        fake.say(ROUTE, *[Say(body=ANSWER)] * 3)
        for _ in range(3):
            await chat(MESSAGES)
        bodies = [call.body for call in fake.calls]
    assert bodies[0] == bodies[1] == bodies[2]
    assert "cache_salt" not in bodies[0]
