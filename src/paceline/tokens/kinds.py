"""Kinds of conversation: what may make a chat template render one in another way.

A conversation collects its kind as bits. Whether a template is append-only is tried out for each kind on a made-up
conversation, with every answer of the kind before every sort of message that may follow it.
"""

from __future__ import annotations

from typing import Any, Final

from paceline.tokens import messages as chat
from paceline.tokens.messages import ChatMessage, Tools
from paceline.tokens.tokenizer import ChatTokenizer

STAND_IN: Final = "~answer~"
"""Content of the stand-in for what the model said; no template treats it as anything but text."""

TOOL_ROLE, EMPTY, EDGES, THINK, TOOLS, SYSTEM, OTHER = 1, 2, 4, 8, 16, 32, 64
CALLS, PARALLEL, REASONING, TOOL_ID, BESIDE = 128, 256, 512, 1024, 2048

WORDS: Final = {
    TOOL_ROLE: "tool messages",
    EMPTY: "empty answers",
    EDGES: "white space around an answer",
    THINK: "thinking in an answer",
    TOOLS: "a tool list",
    TOOLS | CALLS | TOOL_ID | TOOL_ROLE: "tool calls",
    TOOLS | CALLS | TOOL_ID | TOOL_ROLE | BESIDE: "words beside a tool call",
    REASONING: "thinking apart from the answer",
}
"""What the start-up check looks at, in words."""

_CONTENTS: Final = {
    EMPTY: "",
    EDGES: " padded \n",
    THINK: "<think>\nplan\n</think>\n\nafter thought",
}
_TOOL_LIST: Final = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)

_ANSWER_KEYS: Final = {"role", "content", "tool_calls", "reasoning_content"}
_TOOL_KEYS: Final = {"role", "content", "tool_call_id", "name"}


class Kinds:
    """Tells the kind of messages under one template."""

    __slots__ = ("_literals",)

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._literals = tuple(t for t in tokenizer.literals() if "think" not in t)

    def of_answer(self, text: str) -> int:
        """The kind of an answer by its text."""
        if not text:
            return EMPTY
        flags = EDGES if text[0].isspace() or text[-1].isspace() else 0
        if "think>" in text:
            flags |= THINK
        for literal in self._literals:
            if literal in text:
                return flags | OTHER
        return flags

    def of(self, message: ChatMessage, *, first: bool = False) -> int:
        """The kind of a message; `first`: it opens the conversation."""
        role = message.get("role")
        if chat.is_plain(message):
            if role == "user":
                return 0
            if role == "tool":
                return TOOL_ROLE
            if role == "assistant":
                return self.of_answer(message["content"])
            return SYSTEM if role == "system" and first else OTHER
        said = {key: value for key, value in message.items() if value is not None}
        if role == "tool" and said.keys() <= _TOOL_KEYS and isinstance(said.get("content"), str):
            return TOOL_ROLE | TOOL_ID
        if role == "assistant" and said.keys() <= _ANSWER_KEYS:
            return self._of_structured(said)
        return OTHER

    def _of_structured(self, said: dict[str, Any]) -> int:
        content, calls, thought = (
            said.get("content", ""),
            said.get("tool_calls"),
            said.get("reasoning_content"),
        )
        if not isinstance(content, str) or not isinstance(calls, list | tuple | None):
            return OTHER
        flags = self.of_answer(content) if content or not calls else 0
        if calls:
            flags |= CALLS | (PARALLEL if len(calls) > 1 else 0) | (BESIDE if content else 0)
        if thought:
            flags |= REASONING if isinstance(thought, str) else OTHER
        return flags

    def example(
        self, flags: int
    ) -> tuple[list[ChatMessage], list[tuple[ChatMessage, list[ChatMessage]]], Tools | None]:
        """A made-up conversation of a kind: how it opens, its turns (an answer and what is said next), its tools."""
        plain = [chat.assistant(text) for bit, text in _CONTENTS.items() if flags & bit]
        answers: list[ChatMessage] = [chat.assistant("one"), *plain, chat.assistant("two")]
        if flags & REASONING:
            answers.append({"role": "assistant", "content": "three", "reasoning_content": "as planned"})
        askings: list[list[ChatMessage]] = [[chat.user("next")], [chat.user("a\n\nb")]]
        if flags & TOOL_ROLE and not flags & CALLS:
            askings += [[chat.tool("seen")], [chat.tool("seen"), chat.tool("heard")]]
        both = [(answer, asking) for answer in answers for asking in askings]
        turns = [*both, *reversed(both)]
        if flags & CALLS:
            turns = _with_calls(turns, flags)
        opening: list[ChatMessage] = [chat.system("Be brief.")] if flags & SYSTEM else []
        return [*opening, chat.user("first")], turns, _TOOL_LIST if flags & TOOLS else None


def _with_calls(
    turns: list[tuple[ChatMessage, list[ChatMessage]]], flags: int
) -> list[tuple[ChatMessage, list[ChatMessage]]]:
    """Each turn, and before it one that calls tools."""
    mixed: list[tuple[ChatMessage, list[ChatMessage]]] = []
    for number, turn in enumerate(turns[: len(turns) // 2]):
        ids = [f"c{number:07d}{n}" for n in range(2 if flags & PARALLEL else 1)]
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": "let me look" if flags & BESIDE and number % 2 else "",
            "tool_calls": [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": "look", "arguments": {"at": n, "far": "x y"}},
                }
                for n, id_ in enumerate(ids)
            ],
        }
        if flags & REASONING:
            answer["reasoning_content"] = "look first"
        mixed += [(answer, [_seen(id_, flags) for id_ in ids]), turn]
    return mixed


def _seen(id_: str, flags: int) -> ChatMessage:
    seen = chat.tool("seen")
    return {**seen, "tool_call_id": id_, "name": "look"} if flags & TOOL_ID else seen
