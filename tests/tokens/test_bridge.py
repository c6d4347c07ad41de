"""Prompts extend exactly the ids so far, or a new branch begins; never anything between."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import paceline
from paceline.errors import EnvError
from paceline.testing.tokens import CHATML, byte_tokenizer
from paceline.tokens import (
    Bridge,
    ChatTokenizer,
    Conversation,
    assistant,
    probe_append_only,
    system,
    tool,
    user,
)

MARKUP = ("<|im_start|>", "<|im_end|>", "[tools]", "[/tools]", "[call]", "[/call]", "<bos>")

SEPARATED = "{% for m in messages %}<bos>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant {% endif %}"
NO_SEPARATOR = CHATML.replace("<|im_end|>\\n", "<|im_end|>").replace("<|im_end|>\n", "<|im_end|>")
TOOLS_FIRST = "{% if tools %}[tools]{{ tools | tojson }}[/tools]{% endif %}" + CHATML
GROUPED_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<out>{{ m.content }}</out>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
STRIPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_THOUGHT = (  # puts an empty thought into the last answer, as Qwen3 does, and takes it out again later
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_ALL_BUT_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSES_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call]{{ c.name }}[/call]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
APPEND_ONLY = {
    "chatml": CHATML,
    "separated": SEPARATED,
    "no separator": NO_SEPARATOR,
    "tools first": TOOLS_FIRST,
    "grouped tools": GROUPED_TOOLS,
}


class Talk:
    """A conversation with a model that says what it is told to, and its ids as a recorder would hold them."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.bridge = Bridge(tokenizer)
        self.conversation = Conversation(self.bridge)
        self.ids: list[int] = []
        self.samples: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.whys: list[str] = []

    def turn(
        self, *new: Any, says: str | list[int], ends: bool = True, tools: Any = None, whole: Any = None
    ) -> list[int]:
        """One model call; returns the whole prompt that was sent."""
        talk, end = self.conversation, self.tokenizer.stop_ids[0]
        plan = talk.plan_whole(whole, tools) if whole is not None else talk.plan(new, tools)
        added = self.bridge.encode(plan).tolist()
        if not plan.extends:
            self.ids = []
            self.samples.append([])
            self.masks.append([])
        self.whys.append(plan.why)
        prompt = self.ids + added
        content = self.tokenizer.encode(says).tolist() if isinstance(says, str) else says
        sampled = [*content, end] if ends else content
        self.samples[-1] += added + sampled
        self.masks[-1] += [0] * len(added) + [1] * len(sampled)
        self.ids = prompt + sampled
        talk.commit(plan, np.array(sampled, np.int32), end if ends else None, self.tokenizer.decode(content))
        return prompt

    def full(self, messages: list[Any], tools: Any = None) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.render(messages, tools)).tolist()


def talk_with(template: str, **kwargs: Any) -> Talk:
    return Talk(byte_tokenizer(template, markup=MARKUP, **kwargs))


texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<[|"), max_size=12)
asking = st.one_of(
    texts.map(lambda t: [user(t)]),
    texts.map(lambda t: [tool(t)]),
    st.tuples(texts, texts).map(lambda ts: [tool(ts[0]), tool(ts[1])]),
)


@pytest.mark.parametrize("name", APPEND_ONLY)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_incremental_ids_equal_a_full_render(name: str, data: st.DataObject) -> None:
    talk = talk_with(APPEND_ONLY[name])
    messages: list[Any] = [system(data.draw(texts))] if data.draw(st.booleans()) else []
    new = [*messages, user(data.draw(texts))]
    messages = []
    tools = [{"name": "look"}] if data.draw(st.booleans()) else None
    for _ in range(data.draw(st.integers(1, 5))):
        says, ends = data.draw(texts), data.draw(st.booleans())
        prompt = talk.turn(*new, says=says, ends=ends, tools=tools)
        messages += new
        assert prompt == talk.full(messages, tools)
        messages.append(assistant(says))
        new = data.draw(asking)
    assert len(talk.samples) == 1


def test_s21_sampled_ids_are_kept_as_sampled() -> None:
    tokenizer = byte_tokenizer(merges=[("a", "l"), ("l", "a"), ("al", "la")])
    al, la, alla = (tokenizer.encode(text).tolist() for text in ("al", "la", "alla"))
    assert [len(al), len(la), len(alla)] == [1, 1, 1]
    talk = Talk(tokenizer)
    talk.turn(user("say it"), says=al + la)
    prompt = talk.turn(user("again: alla"), says="ok")
    said = talk.full([user("say it")])
    assert prompt[len(said) : len(said) + 2] == al + la
    assert len(talk.samples) == 1
    assert talk.samples[0].count(alla[0]) == 1  # the user's word only


@pytest.mark.parametrize("template", [SEPARATED, CHATML, GROUPED_TOOLS])
def test_s22_the_separator_after_a_sampled_end_token_is_there_and_not_trained(template: str) -> None:
    talk = talk_with(template)
    end = talk.tokenizer.stop_ids[0]
    newline = talk.tokenizer.encode("\n").tolist()[0]
    talk.turn(user("q"), says="one")
    at = len(talk.ids)
    talk.turn(tool("r1"), tool("r2"), says="two")
    prompt = talk.turn(tool("r3"), says="three")
    history = [user("q"), assistant("one"), tool("r1"), tool("r2"), assistant("two"), tool("r3")]
    assert prompt == talk.full(history)
    assert (talk.samples[0][at - 1], talk.masks[0][at - 1]) == (end, 1)
    assert (talk.samples[0][at], talk.masks[0][at]) == (newline, 0)


def test_s23_the_assistant_header_stands_before_every_sampled_span() -> None:
    talk = talk_with(CHATML)
    header = talk.tokenizer.encode("<|im_start|>assistant\n").tolist()
    talk.turn(user("a"), says="7")
    talk.turn(user("b"), says="8")
    ids, mask = talk.samples[0], talk.masks[0]
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    assert len(starts) == 2
    for start in starts:
        assert ids[start - len(header) : start] == header
        assert not any(mask[start - len(header) : start])


def test_s24_a_template_that_strips_thinking_makes_a_sample_a_turn() -> None:
    tokenizer = byte_tokenizer(STRIPS_ALL_BUT_LAST, markup=MARKUP)
    probe = probe_append_only(tokenizer)
    assert probe.holds
    assert probe.breaks == ("thinking in an answer",)
    assert "new sample" in probe.summary
    talk = Talk(tokenizer)
    for turn in range(3):
        talk.turn(user(f"q{turn}"), says=f"<think>hm {turn}</think>a{turn}")
    assert len(talk.samples) == 3
    assert sum(map(sum, talk.masks)) == sum(len(f"<think>hm {t}</think>a{t}") + 1 for t in range(3))
    history = [user("q0"), assistant("a0"), user("q1"), assistant("a1"), user("q2")]
    assert talk.samples[2][: talk.masks[2].index(1)] == talk.full(history)
    assert all("another way" in why for why in talk.whys[1:])


def test_answers_without_thinking_stay_in_one_sample_under_a_template_that_strips_it() -> None:
    talk = talk_with(STRIPS_ALL_BUT_LAST)
    for turn in range(3):
        talk.turn(user(f"q{turn}"), says=f"a{turn}")
    assert len(talk.samples) == 1


def test_thinking_is_kept_through_tool_turns_and_branches_at_the_next_question() -> None:
    talk = talk_with(STRIPS_THINKING)
    talk.turn(user("q"), says="<think>one</think>call")
    talk.turn(tool("r"), says="<think>two</think>answer")
    assert len(talk.samples) == 1
    talk.turn(user("q2"), says="<think>three</think>b")
    assert len(talk.samples) == 2


def test_a_template_that_rewords_the_last_answer_only_extends_what_was_sampled() -> None:
    talk = talk_with(EMPTY_THOUGHT)
    talk.turn(user("q"), says="one")
    prompt = talk.turn(user("r"), says="two")
    assert prompt == talk.full([user("q"), assistant("one"), user("r")])
    assert len(talk.samples) == 1


def test_a_template_that_trims_answers_keeps_the_sampled_white_space() -> None:
    talk = talk_with(TRIMS)
    talk.turn(user("q"), says=" padded \n")
    talk.turn(user("r"), says="two")
    assert len(talk.samples) == 1
    assert " padded \n<|im_end|>\n<|im_start|>user" in talk.tokenizer.decode(talk.ids, keep_special=True)


@pytest.mark.parametrize("ends", [True, False])
def test_s25_an_end_token_is_trained_only_if_it_was_sampled(ends: bool) -> None:
    talk = talk_with(CHATML)
    end = talk.tokenizer.stop_ids[0]
    talk.turn(user("q"), says="5", ends=ends)
    assert (talk.ids[-1] == end) is ends  # a cut answer gets none
    before = len(talk.samples[0])
    prompt = talk.turn(user("r"), says="6", ends=ends)
    assert prompt == talk.full([user("q"), assistant("5"), user("r")])
    ids, mask = talk.samples[0], talk.masks[0]
    at = before - 1 if ends else before
    assert (ids[at], mask[at]) == (end, int(ends))


def test_s26_a_changed_tool_list_begins_a_new_sample_rendered_in_full() -> None:
    talk = talk_with(TOOLS_FIRST)
    a, b = {"name": "a"}, {"name": "b"}
    talk.turn(user("q"), says="one", tools=[a])
    talk.turn(user("same tools"), says="two", tools=[{"name": "a"}])
    assert len(talk.samples) == 1
    prompt = talk.turn(user("r"), says="three", tools=[a, b])
    history = [user("q"), assistant("one"), user("same tools"), assistant("two"), user("r")]
    assert prompt == talk.full(history, [a, b])
    assert len(talk.samples) == 2
    assert talk.whys[-1] == "the tool list changed"


def test_s86_ids_that_close_a_call_appear_once_and_are_not_trained() -> None:
    talk = talk_with(CLOSES_CALLS)
    call, close, end = (talk.tokenizer.id_of(t) for t in ("[call]", "[/call]", "<|im_end|>"))
    sampled = [call, *talk.tokenizer.encode("look").tolist()]
    talk.turn(user("q"), says=sampled, ends=False)
    talk.conversation.answer_as({"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]})
    talk.turn(tool("seen"), says="done")
    ids, mask = talk.samples[0], talk.masks[0]
    assert len(talk.samples) == 1
    at = ids.index(call)
    assert ids[at : at + len(sampled) + 2] == [*sampled, close, end]
    assert mask[at : at + len(sampled) + 2] == [1] * len(sampled) + [0, 0]
    assert ids.count(close) == 1


def test_s88_a_character_split_over_tokens_is_shown_whole_and_its_ids_stay() -> None:
    talk = talk_with(CHATML)
    emoji = talk.tokenizer.encode("🎉").tolist()
    assert len(emoji) == 4
    assert talk.tokenizer.decode(emoji) == "🎉"
    assert talk.tokenizer.decode(emoji[:2]) == "\ufffd"
    talk.turn(user("q"), says=emoji)
    talk.turn(user("half"), says=emoji[:2], ends=False)
    prompt = talk.turn(user("r"), says="ok")
    assert len(talk.samples) == 1
    text = talk.tokenizer.encode("<|im_start|>assistant\n").tolist()
    assert any(prompt[i : i + len(text) + 2] == text + emoji[:2] for i in range(len(prompt)))
    assert len([m for m in talk.masks[0] if m]) == 4 + 1 + 2 + 2 + 1


def test_a_whole_conversation_that_begins_with_the_recorded_one_extends_it() -> None:
    talk = talk_with(CHATML)
    history: list[Any] = [user("q")]
    talk.turn(whole=history, says="one")
    history += [{"role": "assistant", "content": "one", "tool_calls": None}, user("r")]
    talk.turn(whole=history, says="two")
    assert len(talk.samples) == 1
    talk.turn(whole=[user("summary"), user("r")], says="three")
    assert len(talk.samples) == 2
    assert talk.whys[-1] == "the history was rewritten"


def test_a_changed_system_message_begins_a_new_sample() -> None:
    talk = talk_with(CHATML)
    talk.turn(whole=[system("a"), user("q")], says="one")
    prompt = talk.turn(whole=[system("b"), user("q"), assistant("one"), user("r")], says="two")
    assert prompt == talk.full([system("b"), user("q"), assistant("one"), user("r")])
    assert len(talk.samples) == 2


def test_a_plan_that_is_not_committed_leaves_no_trace() -> None:
    talk = talk_with(CHATML)
    talk.turn(user("q"), says="one")
    talk.bridge.encode(talk.conversation.plan([user("lost")]))
    prompt = talk.turn(user("r"), says="two")
    assert prompt == talk.full([user("q"), assistant("one"), user("r")])


def test_a_tokenizer_that_puts_a_space_in_front_does_not_do_so_within_a_conversation() -> None:
    words = ["▁", "▁user", "▁assistant", "▁hi", "user", "assistant", "hi", ":", "<unk>"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    end = raw.token_to_id("<end>")
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}"
    talk = Talk(ChatTokenizer(raw, template, stop_ids=(end,)))
    talk.turn(user("hi"), says="hi")
    prompt = talk.turn(user("hi"), says="hi")
    assert prompt[-3:] == talk.full([user("hi"), assistant("hi"), user("hi")])[-3:]
    assert raw.encode("user hi<end>").ids[0] == words.index("▁user")
    assert words.index("user") in prompt


@pytest.mark.parametrize(
    ("template", "holds", "breaks"),
    [
        (CHATML, True, ()),
        (GROUPED_TOOLS, True, ()),
        (TRIMS, True, ()),
        (STRIPS_THINKING, True, ("thinking in an answer",)),
        (CHATML.replace("m.content", "loop.length ~ m.content"), False, ("plain turns",)),
    ],
)
def test_the_probe_says_what_a_template_does_not_extend(
    template: str, holds: bool, breaks: tuple[str, ...]
) -> None:
    probe = probe_append_only(byte_tokenizer(template, markup=MARKUP))
    assert (probe.holds, probe.breaks) == (holds, breaks)


def test_a_template_that_counts_messages_branches_at_every_turn() -> None:
    talk = talk_with(CHATML.replace("m.content", "loop.length ~ m.content"))
    talk.turn(user("q"), says="one")
    prompt = talk.turn(user("r"), says="two")
    assert prompt == talk.full([user("q"), assistant("one"), user("r")])
    assert len(talk.samples) == 2


def test_the_cost_of_a_turn_does_not_grow_with_the_conversation() -> None:
    talk = talk_with(CHATML)
    rendered: list[int] = []
    encoded: list[int] = []

    class Counting(ChatTokenizer):
        __slots__ = ()

        def render(self, messages: Any, tools: Any = None, *, generate: bool = True) -> str:
            text = super().render(messages, tools, generate=generate)
            rendered.append(len(text))
            return text

        def encode_with_places(self, text: str, places: Any) -> Any:
            encoded.append(len(text))
            return super().encode_with_places(text, places)

    plain = talk.tokenizer
    counting = Counting(plain._tokenizer, CHATML, stop_ids=plain.stop_ids)
    talk = Talk(counting)
    for turn in range(40):
        rendered.clear()
        encoded.clear()
        plan = talk.conversation.plan([user(f"question {turn}")])
        talk.bridge.encode(plan)
        if turn > 1:
            assert max(rendered) < 200
            assert max(encoded) < 100
        talk.turn(user(f"question {turn}"), says="an answer of some length")


def test_messages_that_are_nothing_a_template_can_take_are_refused() -> None:
    talk = talk_with(CHATML)
    with pytest.raises(EnvError, match="at least one new message"):
        talk.conversation.plan([])
    with pytest.raises(EnvError, match="JSON-like"):
        talk.conversation.plan([{"content": object()}])
    refusing = talk_with("{{ raise_exception('only users') }}")
    with pytest.raises(EnvError, match="only users"):
        refusing.conversation.plan([tool("x")])


def test_the_small_policy_is_append_only_token_by_token() -> None:
    directory = Path(paceline.__file__).parent / "assets" / "small_policy"
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("src/paceline/assets/small_policy is not there yet: the shipped policy is NOT covered")
    tokenizer = ChatTokenizer.load(directory)
    assert probe_append_only(tokenizer).holds
    talk = Talk(tokenizer)
    messages: list[Any] = []
    for asked, says in (("Guess: 1 to 15", "8"), ("higher", "12"), ("lower", "10")):
        prompt = talk.turn(user(asked), says=says)
        messages.append(user(asked))
        assert prompt == talk.full(messages)
        messages.append(assistant(says))
    assert len(talk.samples) == 1


def test_no_module_of_ours_needs_transformers() -> None:
    source = Path(find_spec("paceline.tokens").origin).parent  # type: ignore[union-attr, arg-type]
    assert not [p for p in source.glob("*.py") if "import transformers" in p.read_text()]
