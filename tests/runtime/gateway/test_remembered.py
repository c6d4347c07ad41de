"""What the gateway keeps of a rollout: enough for every retry, and no more than its conversation is long."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
from gateway_kit import Client, serve
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.gateway.asked import Asked
from paceline.runtime.gateway.remembered import Remembered
from paceline.tokens import user

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("q")], "logprobs": True},
    "/v1/completions": {"prompt": "q", "max_tokens": 100},
    "/v1/responses": {"input": "q", "instructions": "be brief", "metadata": {"a": "b"}},
    "/v1/messages": {"messages": [user("q")], "max_tokens": 100, "system": "be brief"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_was_given_is_given_again_to_the_letter(path: str, stream: bool) -> None:
    def told(said: Any) -> Any:
        """Of a stream: its text, since it may come in fewer pieces, and how it ends."""
        if not stream:
            return said
        ending = re.sub(r'"sequence_number":\d+', "", said.split("\n\n")[-2])
        return "".join(re.findall(r'"(?:text|content|delta)":"([^"]*)"', said)), ending

    async def program(client: Client) -> None:
        body = {**BODIES[path], "stream": stream}
        _, first, _ = await client.post(path, body)
        _, again, _ = await client.post(path, body, **{"x-stainless-retry-count": "1"})
        assert told(first) == told(again)

    assert len(serve(program, ["one after another", "two"], token_s=0.002).turns) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_were_answered_are_not_kept(stream: bool) -> None:
    """Each holds the whole conversation: of a hundred turns, the first message a hundred times."""

    async def program(client: Client) -> None:
        messages = [user("q" * 20)]
        for n in range(30):
            if stream:
                await client.events("/v1/chat/completions", {"messages": messages})
            else:
                await client.chat(*messages)
            messages = [*messages, {"role": "assistant", "content": "a"}, user(f"more {n}")]
        gc.collect()
        assert sum(isinstance(one, Asked) for one in gc.get_objects()) <= 1

    assert len(serve(program, ["a"] * 30).turns) == 30


def test_a_response_that_is_not_to_be_stored_is_not() -> None:
    async def program(client: Client) -> None:
        for store, status in ((False, 404), (True, 200)):
            _, first, _ = await client.post("/v1/responses", {"input": "q", "store": store})
            answered, _, _ = await client.post(
                "/v1/responses", {"input": "go on", "previous_response_id": first["id"]}
            )
            assert answered == status

    serve(program, ["a", "b", "c"])


MESSAGES = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 9), MESSAGES), min_size=1, max_size=10))
def test_conversations_are_found_as_they_were_whatever_they_go_on_from(
    steps: list[tuple[int, list[int]]],
) -> None:
    remembered, expected = Remembered(), dict[str, list[Any]]()
    for number, (before, new) in enumerate(steps):
        told = expected.get(f"a{before}", [])
        messages = [*told, *({"content": str(n)} for n in new)]
        remembered.add(f"a{number}", messages)
        expected[f"a{number}"] = messages
    for name, messages in expected.items():
        assert remembered.find(name) == messages
    assert remembered.find("b") is None


def test_a_conversation_that_is_said_whole_each_time_is_kept_once_and_a_copy_is_given() -> None:
    remembered = Remembered()
    for n in range(1, 101):
        remembered.add(f"a{n}", [{"content": str(m)} for m in range(n)])
    kept = [one for part in remembered._upto.values() for one in part.messages]
    assert len(kept) == 100
    found = remembered.find("a100")
    assert found is not None
    found[0]["content"] = "changed"
    assert remembered.find("a1") == [{"content": "0"}]
