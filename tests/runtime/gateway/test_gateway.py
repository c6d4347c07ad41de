"""The gateway answers a program as its API would, and records exactly what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import numpy as np
import pytest
from gateway_kit import CALL, LOOK, Client, serve, settled

from paceline.config import GatewaySection, Limits
from paceline.errors import ConfigError, EngineError, EnvError
from paceline.runtime.gateway import Gateway
from paceline.runtime.gateway import session as session_module
from paceline.runtime.gateway.asked import Asked
from paceline.runtime.gateway.session import Session
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import assistant, user

TOOLS = [{"type": "function", "function": LOOK}]


def test_a_chat_is_answered_and_its_next_request_goes_on_from_the_ids() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"), model="any")
        assert said["choices"][0]["message"]["content"] == "one"
        assert said["choices"][0]["finish_reason"] == "stop"
        assert said["usage"]["completion_tokens"] == 4
        await client.chat(user("q"), said["choices"][0]["message"], user("r"))

    rollout = serve(program, ["one", "two"])
    assert [turn.extends for turn in rollout.turns] == [False, True]
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(rollout.turns[1].sampled_ids) == "two"
    assert np.all(rollout.turns[0].logprobs == np.float32(-0.5))
    assert [m.content for m in rollout.messages] == ["q", "one", "r", "two"]


def test_tool_calls_are_parsed_and_the_ids_of_the_answer_stand() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"), tools=TOOLS)
        choice = said["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert (call["function"]["name"], call["function"]["arguments"]) == ("look", '{"at": "sky"}')
        seen = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
        said = await client.chat(user("q"), choice["message"], seen, tools=TOOLS)
        assert said["choices"][0]["message"]["content"] == "it is blue"

    rollout = serve(program, [CALL, "it is blue"])
    assert [turn.extends for turn in rollout.turns] == [False, True]
    assert byte_tokenizer().decode(rollout.turns[0].sampled_ids) == CALL


def test_a_stream_says_what_a_whole_answer_says() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")], "tools": TOOLS, "stream_options": {"include_usage": True}}
        events = await client.events("/v1/chat/completions", body)
        assert events[-1][1] == "[DONE]"
        deltas = [event["choices"][0]["delta"] for _, event in events[:-2]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
        assert events[-3][1]["choices"][0]["finish_reason"] == "tool_calls"
        assert events[-2][1]["usage"]["completion_tokens"] == len(CALL) + 1

    serve(program, [CALL])


def test_a_wrong_secret_and_a_rollout_that_is_over_get_401() -> None:
    kept: list[Any] = []

    async def program(client: Client) -> None:
        kept.append(client.endpoint)
        body = {"messages": [user("q")]}
        for secret, base in (
            ("wrong", None),
            (None, client.endpoint.base_url.rsplit("/", 1)[0] + "/g9.m9.a9"),
        ):
            status, said, _ = await client.post("/v1/chat/completions", body, secret=secret, base=base)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        assert client.endpoint.base_url.startswith("http://127.0.0.1:")
        await client.chat(user("q"))

    serve(program, ["one"])
    assert len(kept[0].secret) >= 43


def test_a_secret_that_is_no_text_is_a_wrong_one() -> None:
    calls: Any = None
    session = Session("a", "secret", calls, GatewaySection(), "policy", "none")
    assert not session.knows("secret\udcff")  # as aiohttp hands over bytes that are no UTF-8
    assert session.knows("secret")


async def test_closing_that_is_cancelled_leaves_no_call_running() -> None:
    class Hangs:
        async def complete(self, *said: Any, **more: Any) -> Any:
            await asyncio.Event().wait()

        async def hang_up(self) -> None: ...

    calls: Any = Hangs()
    session = Session("a", "secret", calls, GatewaySection(), "policy", "none")
    call = session.start(b"", {}, Asked(messages=[user("q")], body={}))
    await asyncio.sleep(0)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert call.task.done()


class Stubborn:
    """A call that ignores being cancelled, so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def complete(self, *said: Any, **more: Any) -> Any:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.left -= 1
                if self.left < 0:
                    raise

    async def hang_up(self) -> None: ...


async def test_a_call_that_ignores_being_cancelled_is_cancelled_until_it_stops_or_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_CLOSE_S", 0.02)
    monkeypatch.setattr(session_module, "_STUCK_S", 0.3)
    for times in (3, 1_000):
        calls: Any = Stubborn(times)
        session = Session("a", "secret", calls, GatewaySection(), "policy", "none")
        call = session.start(b"", {}, Asked(messages=[user("q")], body={}))
        await asyncio.sleep(0)
        if times == 3:
            await session.close()
            assert call.task.done()
            continue
        with pytest.raises(EnvError, match=r"a model call of a did not stop within 0.3 s"):
            await session.close()
        calls.left = 0
        call.task.cancel()
        await asyncio.wait({call.task})


def test_a_secret_does_not_outlive_its_session() -> None:
    async def main() -> None:
        gateway = Gateway(GatewaySection(), byte_tokenizer(), "policy")
        calls: Any = None
        async with gateway.session("a", calls) as first:
            pass
        async with gateway.session("a", calls) as second, aiohttp.ClientSession() as http:
            assert first.secret != second.secret
            for endpoint, status in ((first, 401), (second, 200)):
                headers = {"x-api-key": endpoint.secret}
                async with http.get(f"{endpoint.openai_url}/models", headers=headers) as response:
                    assert response.status == status
        await gateway.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/chat/completions", b"{", 400, "is not JSON"),
        ("/v1/chat/completions", b"[" * 10_000 + b"]" * 10_000, 400, "is not JSON|expected a JSON object"),
        ("/v1/chat/completions", b"\x80\x04\x95cos\nsystem\n.", 400, "is not JSON"),
        ("/v1/chat/completions", [], 400, "expected a JSON object"),
        ("/v1/chat/completions", {"messages": []}, 400, "at least one message"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard"}]}, 400, "role 'wizard'"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "'image_url': this policy reads text only",
        ),
        ("/v1/chat/completions", {"messages": [user("q")], "max_tokens": 0}, 400, "at least 1"),
        ("/v1/completions", {"prompt": [1, -1]}, 400, "token ids from 0"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "a", "n": 65}, 400, "at most 64 answers"),
        ("/v1/completions", {"prompt": "a", "stream_options": "all"}, 400, "stream_options must be"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": 1}]},
            400,
            "must be a list",
        ),
        ("/v1/responses", {"input": "q", "previous_response_id": ["x"]}, 404, "no response ['x']"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, 400, "'computer_call'"),
        ("/v1/responses", {"input": "q", "tools": [{"type": "web_search"}]}, 400, "OpenAI's servers"),
        ("/v1/chat/completions", {"messages": [user("q")], "tools": [{"type": "x"}]}, 400, "tools[0] ('x')"),
        ("/v1/chat/completions", {"messages": [user("q")], "tools": ["x"]}, 400, "a list of objects"),
        ("/v1/messages", {"messages": [user("q")], "tools": [{"name": "bash"}]}, 400, "tools[0] ('bash')"),
        ("/v1/messages", {"messages": [user("q")], "tools": {"name": "x"}}, 400, "a list of objects"),
        ("/v1/responses", {"input": "q", "previous_response_id": "x"}, 404, "no response 'x'"),
        ("/v1/messages", {"messages": [{"role": "x"}]}, 400, "expected user or assistant"),
        ("/v1/embeddings", {}, 404, "nothing that is served here"),
        ("/v1/chat/completions", b'{"a": "' + b"x" * 700_000 + b'"}', 413, "gateway.max_body_mb"),
    ],
)
def test_s91_what_cannot_be_answered_is_refused_and_the_gateway_lives(
    path: str, body: Any, status: int, told: str
) -> None:
    async def program(client: Client) -> None:
        got, said, headers = await client.post(path, body)
        assert got == status, said
        assert any(part in said["error"]["message"] for part in told.split("|")), said
        assert headers["x-should-retry"] == "false"
        await client.chat(user("q"))

    serve(program, ["one"], gateway=GatewaySection(max_body_mb=0.5))


def test_sampling_is_the_runs_and_what_is_left_aside_is_named() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")], "temperature": 0.1, "tool_choice": "required", "max_tokens": 2}
        _, said, headers = await client.post("/v1/chat/completions", body)
        assert headers["x-paceline-ignored"] == "temperature, tool_choice"
        assert said["choices"][0]["finish_reason"] == "length"

    rollout = serve(program, ["onetwo"])
    assert (rollout.temperature, rollout.turns[0].finish, len(rollout.turns[0].sampled_ids)) == (
        1.0,
        "length",
        2,
    )


def test_several_answers_are_drawn_one_after_another_and_share_their_prompt() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"), n=3)
        assert [c["message"]["content"] for c in said["choices"]] == ["a", "b", "c"]

    assert len(serve(program, ["a", "b", "c"]).turns) == 3


def test_a_retry_joins_the_call_under_way_and_repeats_the_answer_given() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        first = asyncio.create_task(client.post("/v1/chat/completions", body))
        await asyncio.sleep(0.1)
        retry = {"x-stainless-retry-count": "1"}
        second = asyncio.create_task(client.post("/v1/chat/completions", body, **retry))
        (_, one, _), (_, two, _) = await asyncio.gather(first, second)
        _, three, _ = await client.post("/v1/chat/completions", body, **retry)
        assert one == two == three

    assert len(serve(program, ["one"], token_s=0.1).turns) == 1


def test_a_request_whose_client_went_away_is_answered_to_its_repetition() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        first = asyncio.create_task(client.post("/v1/chat/completions", body))
        await asyncio.sleep(0.1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await settled()
        _, said, _ = await client.post("/v1/chat/completions", body)
        assert said["choices"][0]["message"]["content"] == "one"

    assert len(serve(program, ["one", "two"], token_s=0.1).turns) == 1


def test_a_retry_that_comes_before_its_first_connection_is_missed_leaves_the_next_question_its_own() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        first = asyncio.create_task(client.post("/v1/chat/completions", body))
        await asyncio.sleep(0.1)
        retry = asyncio.create_task(
            client.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"})
        )
        await asyncio.sleep(0.1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        _, said, _ = await retry
        again = await client.chat(user("q"))
        texts = [one["choices"][0]["message"]["content"] for one in (said, again)]
        assert texts == ["one", "two"]

    assert len(serve(program, ["one", "two"], token_s=0.2).turns) == 2


def test_another_idempotency_key_is_another_question_even_in_a_retry() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        said = [
            (await client.post("/v1/chat/completions", body, **headers))[1]
            for headers in (
                {"Idempotency-Key": "a"},
                {"Idempotency-Key": "b", "x-stainless-retry-count": "1"},
            )
        ]
        assert said[0] != said[1]

    assert len(serve(program, ["one", "two"]).turns) == 2


def test_an_idempotency_key_marks_a_repetition() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        said = [
            (await client.post("/v1/chat/completions", body, **{"Idempotency-Key": key}))[1]
            for key in ("a", "a", "b")
        ]
        assert said[0] == said[1] != said[2]

    assert len(serve(program, ["one", "two"]).turns) == 2


def test_the_same_question_asked_twice_is_sampled_twice_and_parallel_ones_wait_in_line() -> None:
    async def program(client: Client) -> None:
        said = await asyncio.gather(*[client.chat(user("q")) for _ in range(3)])
        assert sorted(s["choices"][0]["message"]["content"] for s in said) == ["a", "b", "c"]

    assert len(serve(program, ["a", "b", "c"], token_s=0.01).turns) == 3


def test_a_failed_engine_is_a_500_that_is_not_retried_and_fails_the_rollout() -> None:
    async def program(client: Client) -> None:
        status, said, headers = await client.post("/v1/chat/completions", {"messages": [user("q")]})
        assert (status, said["error"]["code"], headers["x-should-retry"]) == (500, "engine_failed", "false")

    rollout = serve(program, [EngineError("broken")], check=False)
    assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "engine")


@pytest.mark.parametrize(
    ("limits", "code", "cause"),
    [
        (Limits(max_turns=1), "rollout_truncated", "turns"),
        (Limits(max_context=60), "context_length_exceeded", "context"),
    ],
)
def test_a_used_up_limit_is_a_400_and_the_rollout_is_truncated(limits: Limits, code: str, cause: str) -> None:
    async def program(client: Client) -> None:
        await client.chat(user("q"), max_tokens=8)
        more = {"messages": [user("q"), assistant("one"), user("r" * 40)]}
        status, said, _ = await client.post("/v1/chat/completions", more)
        assert (status, said["error"]["code"]) == (400, code)

    rollout = serve(program, ["one", "two"], limits=limits, check=False)
    assert (rollout.outcome.ending, rollout.outcome.cause) == ("truncated", cause)
    assert rollout.reward == 1.0  # the environment's own word, once the program has ended


def test_the_deadline_stops_a_call_and_the_environment_at_once() -> None:
    async def program(client: Client) -> None:
        status, _, _ = await client.post("/v1/chat/completions", {"messages": [user("q")]})
        assert status in (400, 503)
        await asyncio.sleep(30)

    rollout = serve(program, ["one two three"], token_s=0.5, limits=Limits(deadline_s=1.2), check=False)
    assert (rollout.outcome.ending, rollout.outcome.cause) == ("truncated", "deadline")
    assert rollout.reward == 0.5
    assert rollout.ended - rollout.started < 4
    assert len(rollout.turns[0].sampled_ids) == 2


def test_a_program_that_ends_within_its_call_leaves_the_tokens_it_had() -> None:
    async def program(client: Client) -> None:
        task = asyncio.create_task(client.post("/v1/chat/completions", {"messages": [user("q")]}))
        await asyncio.sleep(0.6)
        task.cancel()

    rollout = serve(program, ["one two three"], token_s=0.2)
    assert rollout.turns[0].finish == "abort"
    assert 1 <= len(rollout.turns[0].sampled_ids) <= 4


def test_thinking_that_is_split_off_and_not_handed_back_is_a_rewritten_history() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"))
        message = said["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("one", "hm")
        await client.chat(user("q"), message, user("r"))
        del message["reasoning_content"]
        await client.chat(user("q"), message, user("s"))

    answers = ["<think>hm</think>\none", "two", "three"]
    rollout = serve(program, answers, gateway=GatewaySection(thinking="split"))
    assert [turn.extends for turn in rollout.turns] == [False, True, False]
    assert byte_tokenizer().decode(rollout.turns[2].prompt_ids, keep_special=True).count("hm") == 0


def test_thinking_that_stays_in_the_text_is_handed_back_with_it() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"))
        await client.chat(user("q"), said["choices"][0]["message"], user("r"))

    rollout = serve(program, ["<think>hm</think>\none", "two"])
    assert [turn.extends for turn in rollout.turns] == [False, True]


def test_completions_go_on_from_text_and_from_ids() -> None:
    async def program(client: Client) -> None:
        _, said, _ = await client.post("/v1/completions", {"prompt": "ab", "logprobs": 0})
        choice = said["choices"][0]
        assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("one", [-0.5] * 4)
        _, said, _ = await client.post("/v1/completions", {"prompt": [70, 71]})
        assert said["choices"][0]["text"] == "two"
        _, said, _ = await client.post(
            "/inference/v1/generate", {"token_ids": [70, 71], "sampling_params": {"max_tokens": 3}}
        )
        choice = said["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"

    rollout = serve(program, ["one", "two", "three"])
    assert rollout.turns[1].prompt_ids.tolist() == [70, 71]


def test_stop_strings_of_a_request_end_its_answer() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"), stop=["END"])
        assert said["choices"][0]["message"]["content"] == "one"

    rollout = serve(program, ["oneENDtwo"])
    assert byte_tokenizer().decode(rollout.turns[0].sampled_ids) == "oneEND"


def test_an_address_that_is_taken_is_told_with_the_options_to_change() -> None:
    async def main() -> None:
        first = Gateway(GatewaySection(), byte_tokenizer(), "policy")
        calls: Any = None
        async with first.session("a", calls):
            port = int(first.url.rsplit(":", 1)[1])
            second = Gateway(GatewaySection(port=port), byte_tokenizer(), "policy")
            with pytest.raises(ConfigError, match=r"gateway\.port"):
                async with second.session("b", calls):
                    pass
        await first.close()

    asyncio.run(main())


def test_a_rollout_in_virtual_time_says_that_it_cannot_serve() -> None:
    from gateway_kit import Serves

    from paceline.testing import play

    rollout = play(Serves(lambda client: asyncio.sleep(0)), [])
    assert "there is no gateway here" in rollout.outcome.detail


def test_what_is_put_behind_an_earlier_response_does_not_change_it() -> None:
    """A leading answer in the input goes on with the one before; its record stays as it was, also where the request is refused."""
    prompts: list[int] = []

    async def program(client: Client) -> None:
        _, first, _ = await client.post("/v1/responses", {"input": "q"})
        more = {
            "previous_response_id": first["id"],
            "input": [{"role": "assistant", "content": "MORE"}, {"role": "user", "content": "next"}],
        }
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        bad = {"previous_response_id": first["id"], "input": [call, {"type": "web_search_call"}]}
        for body in (more, more, bad, {"previous_response_id": first["id"], "input": "plain"}):
            status, said, _ = await client.post("/v1/responses", body)
            assert status == (400 if body is bad else 200)
            if status == 200:
                prompts.append(said["usage"]["input_tokens"])

    rollout = serve(program, ["one", "two", "three", "four"])
    assert prompts[0] == prompts[1]
    assert [turn.after for turn in rollout.turns][-1] == 0, (
        "the plain one goes on from the first answer alone"
    )
    assert rollout.turns[-1].extends


def test_a_mistake_of_ours_is_told_in_the_programs_words_and_not_to_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the gateway")

    monkeypatch.setattr("paceline.runtime.gateway.session.read_answer", broken)

    async def program(client: Client) -> None:
        status, said, headers = await client.post(
            "/v1/chat/completions",
            {"messages": [user("q")], "tools": [{"type": "function", "function": LOOK}]},
        )
        assert status == 500
        assert said["error"]["message"] == "ZeroDivisionError: in the gateway"
        assert headers["x-should-retry"] == "false"

    serve(program, ["one"])
