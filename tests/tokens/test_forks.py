"""A history that goes on from an earlier turn forks there; one that was rewritten grows a branch of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.samples import build_samples
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout
from paceline.domain.task import TaskRef
from paceline.envs.recorder import Recorder
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge, Conversation, assistant, system, tool, user

CALLING = (
    "{% if tools %}[tools]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Agent:
    """A program that sends whole histories, a recorder, and a model that says what it is told to."""

    def __init__(self, template: str = CALLING) -> None:
        self.tokenizer = byte_tokenizer(template)
        self.bridge = Bridge(self.tokenizer)
        self.conversation = Conversation(self.bridge)
        self.recorder = Recorder()

    def asks(self, *history: Any, says: str, tools: Any = None) -> list[int]:
        """Returns the ids that the engine was sent."""
        plan = self.conversation.plan_whole(history, tools)
        ids = self.bridge.encode(plan)
        if plan.base is not None:
            self.recorder.extend(ids, plan.base.turn, plan.roles)
        else:
            self.recorder.prompt(ids, plan.roles)
        sent = self.recorder.context.tolist()
        sampled = np.array([*self.tokenizer.encode(says), self.tokenizer.stop_ids[0]], np.int32)
        logprobs = np.full(len(sampled), -0.5, np.float32)
        self.recorder.segment(sampled, logprobs, ((0, len(sampled)),), 0)
        self.recorder.commit("stop", engine="e", queued_s=0, started=0, ended=0, segments=1)
        node = self.conversation.commit(plan, sampled, self.tokenizer.stop_ids[0], says)
        node.turn = len(self.recorder.turns) - 1
        return sent

    def samples(self) -> list[tuple[str, str]]:
        """(all its text, what of it trains)."""
        rollout = Rollout(
            id=RolloutId(0, 0),
            task=TaskRef("env", "train", 0),
            outcome=COMPLETED,
            turns=tuple(self.recorder.turns),
            reward=1.0,
        )
        built = build_samples(rollout, seq_len=10_000, overlong="cut")
        assert sum(s.trainable_tokens for s in built.samples) == rollout.sampled_tokens
        return [
            (
                self.tokenizer.decode(s.token_ids, keep_special=True),
                self.tokenizer.decode(s.token_ids[s.trainable]),
            )
            for s in built.samples
        ]

    def rendered(self, *history: Any, tools: Any = None) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.render(history, tools)).tolist()


def test_a_second_answer_to_an_earlier_question_forks_and_the_shared_turn_trains_once() -> None:
    agent = Agent()
    agent.asks(user("q"), says="one")
    agent.asks(user("q"), assistant("one"), user("r"), says="two")
    sent = agent.asks(user("q"), assistant("one"), user("other"), says="three")
    assert sent == agent.rendered(user("q"), assistant("one"), user("other"))
    assert [turn.after for turn in agent.recorder.turns] == [-1, -1, 0]
    assert [trains for _, trains in agent.samples()] == ["onetwo", "three"]
    assert "one" in agent.samples()[1][0]


def test_two_conversations_taken_in_turns_are_two_samples() -> None:
    agent = Agent()
    agent.asks(system("main"), user("q"), says="m1")
    agent.asks(system("helper"), user("h"), says="h1")
    agent.asks(system("main"), user("q"), assistant("m1"), user("r"), says="m2")
    agent.asks(system("helper"), user("h"), assistant("h1"), user("i"), says="h2")
    assert [trains for _, trains in agent.samples()] == ["m1m2", "h1h2"]
    assert [turn.after for turn in agent.recorder.turns] == [-1, -1, 0, 1]
    assert [turn.extends for turn in agent.recorder.turns] == [False, False, True, True]


def test_the_ids_that_were_sampled_stand_in_a_fork() -> None:
    agent = Agent()
    agent.asks(user("q"), says="ab")
    agent.asks(user("q"), assistant("ab"), user("r"), says="x")
    before = agent.recorder.ids_after(0).tolist()
    sent = agent.asks(user("q"), assistant("ab"), user("s"), says="y")
    assert sent[: len(before)] == before


@pytest.mark.parametrize(
    "theirs",
    [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": " one\n", "refusal": None, "tool_calls": None},
        {"role": "assistant", "content": "one", "tool_calls": []},
    ],
)
def test_what_a_program_does_to_an_answer_without_meaning_it_is_no_rewriting(theirs: Any) -> None:
    agent = Agent()
    agent.asks(user("q"), says="one")
    agent.asks(user("q"), theirs, user("r"), says="two")
    assert len(agent.samples()) == 1


def test_calls_are_known_again_whatever_their_identifiers_and_spacing() -> None:
    agent = Agent()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    said = '<call>look{"a": 1}</call>'
    agent.asks(user("q"), says=said, tools=tools)
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    agent.conversation.answer_as({"role": "assistant", "content": "", "tool_calls": [call]})
    theirs = {"id": "y", "function": {"name": "look", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [theirs]}
    seen = {**tool("red"), "tool_call_id": "y", "name": "look"}
    sent = agent.asks(user("q"), message, seen, says="it is red", tools=tools)
    assert sent == agent.rendered(user("q"), assistant(said), seen, tools=tools)
    changed = {**theirs, "function": {"name": "look", "arguments": '{"a":2}'}}
    agent.asks(user("q"), {**message, "tool_calls": [changed]}, seen, says="no", tools=tools)
    assert len(agent.samples()) == 2


def test_compaction_begins_a_branch_and_going_back_to_the_old_history_does_not() -> None:
    agent = Agent()
    agent.asks(user("q"), says="one")
    agent.asks(user("in short: one"), says="two")
    agent.asks(user("q"), assistant("one"), user("r"), says="three")
    assert [trains for _, trains in agent.samples()] == ["onethree", "two"]


def test_s26_other_tools_begin_a_branch_and_each_list_has_its_own_history() -> None:
    agent = Agent()
    tools = [{"type": "function", "function": {"name": "look"}}]
    agent.asks(user("q"), says="one")
    plan = agent.conversation.plan_whole([user("q"), assistant("one"), user("r")], tools)
    assert (plan.extends, plan.why) == (False, "the tool list changed")
    agent.asks(user("q"), assistant("one"), user("r"), says="two", tools=tools)
    agent.asks(user("q"), assistant("one"), user("s"), says="three")
    assert [trains for _, trains in agent.samples()] == ["onethree", "two"]


def test_answers_drawn_to_one_question_are_branches_that_share_it() -> None:
    agent = Agent()
    for said in ("a", "b", "a"):
        agent.asks(user("q"), says=said)
    assert [trains for _, trains in agent.samples()] == ["a", "b", "a"]
    agent.asks(user("q"), assistant("b"), user("r"), says="c")
    assert [trains for _, trains in agent.samples()] == ["a", "bc", "a"]


def test_ids_given_whole_go_on_from_the_longest_turn_that_they_begin_with() -> None:
    recorder = Recorder()

    def turn(prompt: list[int], sampled: list[int]) -> None:
        recorder.prompt(np.array(prompt, np.int32))
        logprobs = np.full(len(sampled), -0.5, np.float32)
        recorder.segment(np.array(sampled, np.int32), logprobs, ((0, len(sampled)),), 0)
        recorder.commit("stop", engine="e", queued_s=0, started=0, ended=0, segments=1)

    turn([1, 2], [3])
    turn([1, 2, 3, 4], [5])
    turn([1, 2, 3, 9], [6])
    turn([1, 2, 3, 4, 5, 7], [8])
    turn([2, 2], [3])
    assert [t.prompt_ids.tolist() for t in recorder.turns] == [[1, 2], [4], [9], [7], [2, 2]]
    assert [t.after for t in recorder.turns] == [-1, -1, 0, 1, -1]
    assert [t.extends for t in recorder.turns] == [False, True, True, True, False]


def test_a_call_that_is_rolled_back_leaves_the_branch_that_was() -> None:
    agent = Agent()
    agent.asks(user("q"), says="one")
    agent.asks(user("q"), assistant("one"), user("r"), says="two")
    before = agent.recorder.context.tolist()
    agent.recorder.extend(np.array([7], np.int32), 0)
    agent.recorder.roll_back()
    assert agent.recorder.context.tolist() == before
    agent.asks(user("q"), assistant("one"), user("r"), assistant("two"), user("s"), says="three")
    assert len(agent.samples()) == 1


def test_roles_say_whose_words_the_new_tokens_are() -> None:
    agent = Agent()
    agent.asks(system("be kind"), user("what is it?"), says="one")
    roles = agent.recorder.turns[0].roles
    assert [(role, n) for role, n in roles if role] == [("system", 7), ("user", 11)]
    assert sum(n for _, n in roles) == len(agent.recorder.turns[0].prompt_ids)
    agent.asks(system("be kind"), user("what is it?"), assistant("one"), tool("ünï"), says="two")
    assert [(role, n) for role, n in agent.recorder.turns[1].roles if role] == [("tool", 5)]
