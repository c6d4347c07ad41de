"""A stream shows an answer while it is sampled, and what is recorded is what is recorded without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest
from gateway_kit import CALL, LOOK, TEMPLATE, Client, Program, Serves, serve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.config import GatewaySection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.gateway import Gateway
from paceline.runtime.gateway import spoken as spoken_module
from paceline.runtime.gateway.spoken import Spoken
from paceline.runtime.runner import RolloutRunner
from paceline.testing.tokens import MARKUP, byte_tokenizer
from paceline.tokens import Bridge, user
from paceline.tokens.tool_calls import BEGINNINGS, FORMATS, PYTHON_TAG, read_answer

TOOLS = [{"type": "function", "function": LOOK}]
LONG = "the quick brown fox jumps over the lazy dog ☕ twice"
TOKENIZER = byte_tokenizer(TEMPLATE)

ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (
        {"messages": [user("q")]},
        lambda event: event["choices"][0]["delta"].get("content") if event.get("choices") else None,
    ),
    "/v1/completions": (
        {"prompt": "q", "max_tokens": 100},
        lambda event: event["choices"][0]["text"] if event.get("choices") else None,
    ),
    "/v1/responses": (
        {"input": "q"},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
    ),
    "/v1/messages": (
        {"messages": [user("q")], "max_tokens": 100},
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else None,
    ),
}


async def pieces(client: Client, path: str, body: Any, most: int | None = None) -> list[str]:
    """Texts of the events as they come; after `most` of them the client is gone."""
    found: list[str] = []
    reads = ROUTES[path][1]
    sent = {"Authorization": f"Bearer {client.endpoint.secret}"}
    async with client.http.post(
        client.endpoint.base_url + path, data=json.dumps({**body, "stream": True}), headers=sent
    ) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                text = reads(json.loads(line[6:]))
                found += [text] if text else []
            if most is not None and len(found) >= most:
                response.close()
                return found
    return found


@pytest.mark.parametrize("path", ROUTES)
def test_text_comes_while_it_is_sampled_and_says_what_a_whole_answer_says(path: str) -> None:
    async def program(client: Client) -> None:
        assert "".join(await pieces(client, path, ROUTES[path][0])) == LONG
        found = await pieces(client, path, ROUTES[path][0], most=3)
        assert LONG.startswith("".join(found))
        # Three tokens and more were on their way before the rest was sampled.
        assert len("".join(found)) < len(LONG)

    rollout = serve(program, [LONG, LONG], token_s=0.004)
    assert TOKENIZER.decode(rollout.turns[0].sampled_ids) == LONG
    assert rollout.turns[0].segments == 1


def test_a_tool_call_is_held_back_whole_and_the_text_before_it_is_not() -> None:
    said = "let me see. " + CALL

    async def program(client: Client) -> None:
        body = {"messages": [user("q")], "tools": TOOLS}
        events = [event for _, event in await client.events("/v1/chat/completions", body)][:-1]
        deltas = [event["choices"][0]["delta"] for event in events]
        texts = [delta["content"] for delta in deltas if delta.get("content")]
        assert "".join(texts) == "let me see."
        assert len(texts) > 3
        (call,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert call["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        # What the program was shown is what it hands back: the next turn goes on from the ids.
        told = {"role": "assistant", "content": "".join(texts), "tool_calls": [{**call, "type": "function"}]}
        seen = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
        await client.chat(user("q"), told, seen, tools=TOOLS)

    rollout = serve(program, [said, "it is blue"], token_s=0.003)
    assert TOKENIZER.decode(rollout.turns[0].sampled_ids) == said
    assert [turn.extends for turn in rollout.turns] == [False, True]


def test_a_retry_of_a_stream_that_broke_off_is_told_all_of_it_from_the_beginning_and_samples_nothing() -> (
    None
):
    async def program(client: Client) -> None:
        body = ROUTES["/v1/chat/completions"][0]
        assert await pieces(client, "/v1/chat/completions", body, most=4)
        assert "".join(await pieces(client, "/v1/chat/completions", body)) == LONG

    rollout = serve(program, [LONG], token_s=0.004)  # a second call would have no answer
    assert len(rollout.turns) == 1


def test_answers_drawn_to_one_request_are_streamed_one_after_the_other() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")], "n": 2, "stream_options": {"include_usage": True}}
        events = [event for _, event in await client.events("/v1/chat/completions", body)]
        texts = ["", ""]
        for event in events[:-2]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == ["one of two", "two of two"]
        assert events[-2]["usage"]["completion_tokens"] == 22

    serve(program, ["one of two", "two of two"], token_s=0.002)


def test_thinking_that_is_split_off_is_streamed_in_its_own_place() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")]}
        events = [event for _, event in await client.events("/v1/chat/completions", body)][:-1]
        deltas = [event["choices"][0]["delta"] for event in events]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        assert ("".join(thoughts), len(thoughts) > 3) == ("so it must be", True)
        assert "".join(delta.get("content") or "" for delta in deltas) == "forty two"
        told = [event for _, event in await client.events("/v1/messages", {**body, "max_tokens": 99})]
        kinds = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
        assert kinds == ["thinking", "text"]

    said = "<think>\nso it must be\n</think>\n\nforty two"
    serve(program, [said, said], token_s=0.002, gateway=GatewaySection(thinking="split"))


def test_thinking_that_is_empty_leaves_no_tags_in_the_answer() -> None:
    async def program(client: Client) -> None:
        said = await client.chat(user("q"))
        assert said["choices"][0]["message"]["content"] == "forty two"

    serve(program, ["<think>\n\n</think>\n\nforty two"], gateway=GatewaySection(thinking="split"))


def test_a_stream_whose_engine_fails_after_it_has_begun_ends_in_an_error_event() -> None:
    class Breaks:
        """Tells some, and fails."""

        tokenizer = TOKENIZER

        class recorder:
            context_tokens = call_tokens = 0
            turns: tuple[Any, ...] = ()

        async def complete(self, messages: Any, *, tell: Any, **more: Any) -> Any:
            tell(TOKENIZER.encode("some").tolist())
            await asyncio.sleep(0.05)
            raise EngineError("engine e0: broke")

        def stop_strings(self, asked: tuple[str, ...]) -> tuple[str, ...]:
            return asked

        async def hang_up(self) -> None: ...

    async def main() -> None:
        gateway = Gateway(GatewaySection(), TOKENIZER, "policy")
        calls: Any = Breaks()
        try:
            async with gateway.session("g0.m0", calls) as endpoint, aiohttp.ClientSession() as http:
                body = {"messages": [user("q")]}
                events = await Client(endpoint, http).events("/v1/chat/completions", body)
        finally:
            await gateway.close()
        assert events[1][1]["choices"][0]["delta"]["content"] == "some"
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["message"] == "engine e0: broke"

    asyncio.run(main())


# ── what may be shown early ──

FRAGMENTS = (
    *(
        "plain",
        " words",
        "\n",
        "  ",
        "{",
        "}",
        "☕",
        "é",
        "<",
        "tool",
        "<tool_call>",
        "</tool_call>",
        "END",
        "EN",
    ),
    *(
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "<|tool_call",
        "<｜tool▁call▁begin｜>",
        CALL,
        '{"name": "look"}',
    ),
    *MARKUP[:1],
)


def shown(ids: Sequence[int], cuts: Sequence[int], **how: Any) -> tuple[str, str]:
    told: list[tuple[str, str]] = []
    spoken = Spoken(TOKENIZER, lambda kind, text: told.append((kind, text)), **how)
    at = 0
    for cut in (*cuts, len(ids)):
        if ids[at : at + cut]:
            spoken.take(ids[at : at + cut])
        at += cut
    by_kind = ["".join(text for kind, text in told if kind == wanted) for wanted in ("text", "thinking")]
    assert by_kind == [spoken.text, spoken.thinking]
    return spoken.text, spoken.thinking


def agree(said: str, cuts: Sequence[int], format: str, has_tools: bool, split: bool, stop: str) -> None:
    """What is shown of an answer that is read is the beginning of what it is read as."""
    ids = TOKENIZER.encode(said).tolist()
    text, thinking = shown(ids, cuts, format=format, has_tools=has_tools, split=split, stops=(stop,))
    raw = said.partition(stop)[0]
    answer = read_answer(raw, format, TOOLS if has_tools else None, split_thinking=split)
    content = answer.content
    if content == raw and not answer.calls and format != "harmony":
        content = TOKENIZER.decode(ids).partition(stop)[0]
    assert answer.thinking.startswith(thinking)
    assert content.startswith((text, text.lstrip()))


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(1, 5), max_size=80),
    st.sampled_from(["none", *FORMATS]),
    st.booleans(),
    st.booleans(),
)
@example(["\n", "\n", "☕"], [4], "none", False, False)  # its last byte comes alone
@example(["\n", "  ", "☕", "plain"], [5, 1, 1], "none", False, False)  # and so do letters after it
@settings(max_examples=200, deadline=None)
def test_what_is_shown_early_is_the_beginning_of_what_is_read_in_the_end(
    fragments: list[str], cuts: list[int], format: str, has_tools: bool, split: bool
) -> None:
    said = "".join(fragments)
    if has_tools or split:
        agree(said, cuts, format, has_tools, split, "END")
        return
    ids = TOKENIZER.encode(said).tolist()
    text, _ = shown(ids, cuts, format=format, has_tools=False, split=False, stops=("END",))
    plain = TOKENIZER.decode(ids)
    assert plain.partition("END")[0].startswith(text)
    # All of it, but what may be the beginning of a stop string.
    if "END" not in plain:
        assert len(plain) - len(text) <= 2


TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<", "a", " ", "\n", "END", PYTHON_TAG, CALL)


@given(
    st.lists(st.sampled_from(TAGS), max_size=9).map("".join),
    st.lists(st.integers(1, 12), max_size=40),
    st.sampled_from(["none", "hermes", "llama"]),
    st.booleans(),
    st.sampled_from(["END", "</think>", "</think>\n\nEND"]),
)
@example("plain <think> words</think>answer", [1] * 40, "none", False, "END")
@example("<<think></think>a", [1] * 40, "none", False, "END")
@example("[THINK]a</think>b[/THINK]c", [1] * 40, "none", False, "END")
@example("a[/THINK]b</think>c", [1] * 40, "none", False, "END")
@example("a[/THINK]b</think>c", [], "none", False, "END")
@example("<think>a[/THINK]b</think>c", [], "none", False, "END")
@example("<think>a</think>\n\nEND", [1] * 40, "none", False, "</think>\n\nEND")
@example(PYTHON_TAG + '{"name": "look", "arguments": {}}', [1] * 60, "llama", True, "END")
@settings(max_examples=400, deadline=None)
def test_thinking_is_shown_early_as_it_is_split_off_in_the_end(
    said: str, cuts: list[int], format: str, has_tools: bool, stop: str
) -> None:
    agree(said, cuts, format, has_tools, True, stop)


@given(st.binary(max_size=60), st.lists(st.integers(1, 4), max_size=60))
def test_bytes_that_are_no_text_come_out_as_they_are_decoded_as_a_whole(
    sampled: bytes, cuts: list[int]
) -> None:
    alphabet = [int(TOKENIZER.encode(chr(n))[0]) for n in range(128)]
    ids = [alphabet[byte] if byte < 128 else byte for byte in sampled]
    text, _ = shown(ids, cuts, format="none", has_tools=False, split=False, stops=())
    assert TOKENIZER.decode(ids).startswith(text)


def test_a_long_run_of_bytes_that_are_no_text_is_decoded_a_few_times_only() -> None:
    calls = 0

    class Counts:
        stop_ids = TOKENIZER.stop_ids
        is_special = staticmethod(TOKENIZER.is_special)

        def decode(self, ids: Any) -> str:
            nonlocal calls
            calls += 1
            return "\ufffd" * len(ids)

    tokenizer: Any = Counts()
    spoken = Spoken(tokenizer, lambda kind, text: None, format="none", has_tools=False, split=False, stops=())
    for _ in range(10_000):
        spoken.take([1])
    assert calls < 60


LONG_ANSWERS = {
    "thinking": "<think>" + "so it is, and " * 300,
    "thinking whose opening tag stands in the prompt": "so it is, and " * 300 + "</think>answer",
    "an answer without thinking": "plain words < [/ and more " * 180,
    "space between thoughts": "<think>so" + "\n" * 4000 + "it is</think>answer",
    "space before an answer": " " * 4000 + "answer",
    "calls": '{"name": "look", "arguments": {"at": "' + "sky " * 1000,
    "what may be a call": "<|python_tag|>" * 300,
}


@pytest.mark.parametrize("name", LONG_ANSWERS)
@pytest.mark.parametrize(("format", "has_tools"), [("llama", True), ("none", False)])
@pytest.mark.parametrize("split", [True, False])
def test_each_character_of_a_long_answer_is_looked_at_a_few_times_only(
    name: str, format: str, has_tools: bool, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, looked_at = LONG_ANSWERS[name], 0

    def counted(function: Any) -> Any:
        def look(text: str, *marks: Any) -> Any:
            nonlocal looked_at
            looked_at += len(text)
            return function(text, *marks)

        return look

    for function in ("first_mark", "sure_of", "thought"):
        monkeypatch.setattr(spoken_module, function, counted(getattr(spoken_module, function)))
    held: list[int] = []
    spoken = Spoken(
        TOKENIZER, lambda kind, text: None, format=format, has_tools=has_tools, split=split, stops=("END",)
    )
    for id_ in TOKENIZER.encode(said).tolist():
        spoken.take([id_])
        held.append(len(spoken._held) + len(spoken._unsure))
    # A token at a time, with the end that a mark may begin in: some ten characters around each.
    assert looked_at < 40 * len(said)
    assert max(held) < 2 * max(map(len, (PYTHON_TAG, "</think>")))


def test_every_family_says_where_its_calls_begin() -> None:
    assert set(BEGINNINGS) == set(FORMATS) - {"harmony"}
    assert np.all([mark == "{" or mark in CALLS_BY_FORMAT[name] for name, mark in BEGINNINGS.items()])


CALLS_BY_FORMAT = {
    "gemma": "<|tool_call>call:look{}<tool_call|>",
    "hermes": CALL,
    "qwen_xml": "<tool_call>\n<function=look>\n</function>\n</tool_call>",
    "glm": "<tool_call>look\n</tool_call>",
    "mistral": '[TOOL_CALLS]look[ARGS]{"at": "sky"}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
}


class Stops:
    """Answers `LONG` in three requests: the first tells and is aborted, the second is aborted and tells nothing."""

    info = EngineInfo("e0", None, None)

    def __init__(self) -> None:
        self.ids = [*TOKENIZER.encode(LONG).tolist(), TOKENIZER.stop_ids[0]]
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.prompts.append(request.token_ids.tolist())
        assert request.tell is not None
        at = (0, 7, 20, len(self.ids))
        ids = self.ids[at[len(self.prompts) - 1] : at[len(self.prompts)]]
        last = len(self.prompts) == 3
        if len(self.prompts) != 2:
            for id_ in ids if last else ids[:4]:  # an abort may come back with more than was told
                request.tell([id_])
                await asyncio.sleep(0.002)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return GenerateReply(np.array(ids, np.int32), logprobs, "stop" if last else "abort", ((0, len(ids)),))

    async def abort(self, request_id: str) -> None: ...


class OpenGate:
    def request(self, event: Any) -> asyncio.Future[GrantTurn]:
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, "e0", 0))
        return granted

    def report(self, event: Any) -> None: ...


class Says:
    """Tells each answer as it is sampled, and ends it where a stop string is complete, as engines do. Of a pair it tells
    the first and returns the second."""

    info = EngineInfo("e0", None, None)

    def __init__(self, *answers: str | tuple[str, str]) -> None:
        self.answers = [(said, said) if isinstance(said, str) else said for said in answers]

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        told, answer = self.answers.pop(0)
        ends = [at + len(stop) for stop in request.sampling.stop if (at := answer.find(stop)) >= 0]
        ids = TOKENIZER.encode(answer[: min(ends, default=None)]).tolist()
        ids += [] if ends else TOKENIZER.stop_ids[:1]
        for id_ in ids if told == answer else TOKENIZER.encode(told).tolist():
            if request.tell is not None:
                request.tell([id_])
                await asyncio.sleep(0.001)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return GenerateReply(np.array(ids, np.int32), logprobs, "stop", ((0, len(ids)),))

    async def abort(self, request_id: str) -> None: ...


def served(
    engine: Any,
    program: Program,
    sampling: SamplingSection | None = None,
    section: GatewaySection | None = None,
) -> Rollout:
    """The rollout in which `program` ran, its model calls going to `engine`."""

    async def main() -> Rollout:
        gateway, env = Gateway(section or GatewaySection(), TOKENIZER, "policy"), Serves(program)
        shared = EnvRuntime(
            env, env.tasks("train"), Limits(), sampling or SamplingSection(), Bridge(TOKENIZER)
        )
        runner = RolloutRunner(
            {("train", "env"): shared},
            {"e0": engine},
            OpenGate(),  # type: ignore[arg-type]
            asyncio.get_running_loop().time,
            gateway=gateway,
        )
        try:
            return await runner.run(StartRollout(RolloutId(0, 0), TaskRef("env", "train", 0), 7, 8, "e0", 0))
        finally:
            await gateway.close()

    rollout = asyncio.run(main())
    assert rollout.outcome.ending == "completed", rollout.outcome
    return rollout


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("thinking", ["content", "split"])
def test_a_stop_string_of_the_run_is_shown_as_little_as_one_that_is_asked_for(
    path: str, thinking: Any
) -> None:
    found: list[str] = []

    async def program(client: Client) -> None:
        body = {**ROUTES[path][0], "stop": ["!!"], "stop_sequences": ["!!"]}
        found.extend(["".join(await pieces(client, path, body)) for _ in range(2)])

    engine = Says("the answer ### and more", "the answer !! and more")
    served(engine, program, SamplingSection(stop=("###",)), GatewaySection(thinking=thinking))
    asked = "the answer !! and more" if path == "/v1/responses" else "the answer "
    assert found == ["the answer ", asked]


def test_an_answer_that_the_run_s_stop_string_ends_is_streamed_as_it_is_answered_and_gone_on_from() -> None:
    async def program(client: Client) -> None:
        body = {"messages": [user("q")], "tools": TOOLS}
        streamed = "".join(await pieces(client, "/v1/chat/completions", body))
        whole = (await client.chat(user("other"), tools=TOOLS))["choices"][0]["message"]["content"]
        assert (streamed, whole) == ("the answer ", "the answer ")
        for question, answer in (("q", streamed), ("other", whole)):
            told = {"role": "assistant", "content": answer}
            await client.chat(user(question), told, user("more"), tools=TOOLS)

    said = "the answer ###"
    rollout = served(Says(said, said, "one", "two"), program, SamplingSection(stop=("###",)))
    assert [(turn.extends, turn.after) for turn in rollout.turns][2:] == [(True, 0), (True, 1)]


def test_thinking_that_its_engine_told_otherwise_than_it_returned_it_is_answered_as_it_was_shown() -> None:
    async def program(client: Client) -> None:
        events = [
            event for _, event in await client.events("/v1/chat/completions", {"messages": [user("q")]})
        ]
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        thinking = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert (thinking, text) == (told_first.removeprefix("<think>"), "forty two")
        told = {"role": "assistant", "content": text, "reasoning_content": thinking}
        await client.chat(user("q"), told, user("more"))

    told_first, returned = "<think>so it is and so it has to be", "<think>or not?</think>forty two"
    rollout = served(Says((told_first, returned), "yes"), program, section=GatewaySection(thinking="split"))
    assert [turn.extends for turn in rollout.turns] == [False, True]


def test_a_turn_of_several_requests_is_one_stream() -> None:
    found: list[str] = []

    async def program(client: Client) -> None:
        found.extend(await pieces(client, "/v1/chat/completions", ROUTES["/v1/chat/completions"][0]))

    engine = Stops()
    rollout = served(engine, program)
    assert engine.prompts[2] == engine.prompts[0] + engine.ids[:20]
    assert "".join(found) == LONG
    assert len(found) > 4
    (turn,) = rollout.turns
    assert (TOKENIZER.decode(turn.sampled_ids), turn.segments) == (LONG, 3)
