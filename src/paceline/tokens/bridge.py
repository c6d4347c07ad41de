"""Prompts that extend exactly the ids so far.

A conversation's ids are never made twice. The first prompt is rendered and encoded whole. After the model has
answered, a further prompt is the ids so far (prompt and sampled ids, as they were) followed by new ones, which
stand for: what the template closes an assistant message with, less what the model has sampled of it; the new
messages; the header of the next answer.

Two ways lead to those new ids:

- *local*: the new messages are rendered behind a stand-in for the conversation, so the cost does not depend on
  its length. Right whenever the template is append-only for this kind of conversation, which `Bridge` tries out
  once for each kind (tools or not, thinking or not, …) before it relies on it.
- *in full*: the whole conversation is rendered, and what it adds to the text so far is encoded. Where it does not
  extend the text so far (the template strips old thinking, say), the prompt is the full rendering and begins a
  new branch.

A changed tool list, or a history that is not the one recorded, begins a new branch as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import EnvError
from paceline.tokens import messages as chat
from paceline.tokens.messages import ChatMessage, Tools
from paceline.tokens.tokenizer import ChatTokenizer

Ids = NDArray[np.int32]

_STAND_IN: Final = "~answer~"
"""Content of the stand-in for what the model said; no template treats it as anything but text."""

_TOOL_ROLE, _EMPTY, _EDGES, _THINK, _TOOLS, _SYSTEM, _OTHER = 1, 2, 4, 8, 16, 32, 64
"""What may make a template render a conversation in another way; a conversation collects them as bits."""

_WORDS: Final = {
    _TOOL_ROLE: "tool messages",
    _EMPTY: "empty answers",
    _EDGES: "white space around an answer",
    _THINK: "thinking in an answer",
    _TOOLS: "a tool list",
}

_CONTENTS: Final = {
    _EMPTY: "",
    _EDGES: " padded \n",
    _THINK: "<think>\nplan\n</think>\n\nafter thought",
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

_CACHE_ENTRIES, _CACHE_CHARS = 4096, 16_000_000
"""Encoded prompts kept for reuse: the members of a group share their first, and observations repeat."""


class Plan:
    """The prompt of the next model call, before and after it is encoded. `Bridge.encode` fills in `ids`."""

    __slots__ = ("_anchor", "_key", "extends", "flags", "ids", "messages", "new", "text", "tools", "why")

    def __init__(
        self,
        text: str,
        new: list[ChatMessage],
        tools: Tools | None,
        flags: int,
        ids: Ids | None = None,
        messages: list[ChatMessage] | None = None,
        why: str = "",
        *,
        anchor: int | None = None,
        key: Hashable = None,
    ) -> None:
        self.extends = messages is None
        """True: `ids` come after everything so far. False: they are the whole prompt of a new branch."""
        self.text = text
        """What `ids` say."""
        self.new = new
        self.messages = messages
        """The whole conversation, when it does not extend the recorded one."""
        self.tools = tools
        self.flags = flags
        self.ids = ids
        self.why = why
        """Why a new branch begins; empty when none does."""
        self._anchor = anchor
        self._key = key


class Bridge:
    """What is shared by all conversations of one tokenizer: its template's manners, and a cache."""

    __slots__ = ("_append_only", "_cache", "_closing", "_literals", "tokenizer")

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._append_only: dict[int, bool] = {}
        self._cache = _Cache(_CACHE_ENTRIES, _CACHE_CHARS)
        self._closing: dict[bytes, str | None] = {}
        self._literals = tuple(t for t in tokenizer.literals() if "think" not in t)

    def encode(self, plan: Plan) -> Ids:
        """Fill in `plan.ids` and return them."""
        return self.settle(plan, self.tokenize(plan)) if plan.ids is None else plan.ids

    def tokenize(self, plan: Plan) -> Ids:
        """The ids of a plan. Touches nothing else, so it may run in a thread when the text is long."""
        # Encoded behind the end token that was sampled: some tokenizers put a space in front of whatever they
        # are given first, and none of them merges anything across a special token.
        anchor = plan._anchor
        if anchor is not None:
            ids = self.tokenizer.encode(self.tokenizer.token(anchor) + plan.text)
            if len(ids) and ids[0] == anchor:
                return ids[1:]
        return self.tokenizer.encode(plan.text)

    def settle(self, plan: Plan, ids: Ids) -> Ids:
        """Note what `tokenize` made of a plan, for it and for its like."""
        plan.ids = ids
        if plan._key is not None:
            self._cache.put(plan._key, (ids, plan.text), len(plan.text))
        return ids

    def flags_of_answer(self, text: str) -> int:
        if not text:
            return _EMPTY
        flags = _EDGES if text[0].isspace() or text[-1].isspace() else 0
        if "think>" in text:
            flags |= _THINK
        for literal in self._literals:
            if literal in text:
                return flags | _OTHER
        return flags

    def is_append_only(self, flags: int) -> bool:
        """Whether conversations of this kind can be extended locally; tried out once for each kind."""
        if flags & _OTHER:
            return False
        known = self._append_only.get(flags)
        if known is None:
            known = self._append_only[flags] = not self._first_break(flags)
        return known

    def opening(self, messages: list[ChatMessage], tools: Tools | None, flags: int, why: str) -> Plan:
        """A whole prompt."""
        key = ("open", chat.key_of(messages), chat.key_of_tools(tools))
        found = self._cache.get(key)
        text = found[1] if found else self.tokenizer.render(messages, tools)
        return Plan(text, messages, tools, flags, found[0] if found else None, messages, why, key=key)

    def local(self, new: list[ChatMessage], tools: Tools | None, flags: int, end: int | None) -> Plan | None:
        """What `new` adds after an answer, rendered behind a stand-in; None if the template cannot do that."""
        key = ("local", chat.key_of(new), chat.key_of_tools(tools), end)
        found = self._cache.get(key)
        if found is not None:
            ids, text = found
            return Plan(text, new, tools, flags, ids)
        rest = self._after_stand_in(new, tools)
        if rest is None:
            return None
        closing = self.closing(tools)
        if closing is None or not rest.startswith(closing):
            return None
        text = self.less_end(closing, end) + rest[len(closing) :]
        return Plan(text, new, tools, flags, anchor=end, key=key)

    def closing(self, tools: Tools | None) -> str | None:
        """What the template puts after the content of an assistant message; None if it cannot be told."""
        key = chat.key_of_tools(tools)
        if key not in self._closing:
            self._closing[key] = self._after_stand_in([], tools)
        return self._closing[key]

    def less_end(self, closing: str, end: int | None) -> str:
        """`closing` without the end token that was sampled, and without what stands before it."""
        if end is None:
            return closing
        token = self.tokenizer.token(end)
        at = closing.find(token) if token else -1
        return closing if at < 0 else closing[at + len(token) :]

    def _after_stand_in(self, new: list[ChatMessage], tools: Tools | None) -> str | None:
        base: list[ChatMessage] = [chat.user("~ask~"), chat.assistant(_STAND_IN)]
        try:
            text = self.tokenizer.render([*base, *new], tools, generate=bool(new))
        except EnvError:
            return None  # this template wants other company: the conversation is then rendered in full
        _, found, rest = text.partition(_STAND_IN)
        return rest if found and _STAND_IN not in rest else None

    def _first_break(self, flags: int) -> str:
        """Extend a made-up conversation of this kind; returns what the first turn was that differs, else nothing."""
        tools = _TOOL_LIST if flags & _TOOLS else None
        answers = ["one", *(text for bit, text in _CONTENTS.items() if flags & bit), "two"]
        askings: list[list[ChatMessage]] = [[chat.user("next")], [chat.user("a\n\nb")]]
        if flags & _TOOL_ROLE:
            askings += [[chat.tool("seen")], [chat.tool("seen"), chat.tool("heard")]]
        history: list[ChatMessage] = [chat.system("Be brief.")] if flags & _SYSTEM else []
        history.append(chat.user("first"))
        closing = self.closing(tools)
        if closing is None:
            return "an answer cannot be found in its rendering"
        try:
            so_far = self.tokenizer.render(history, tools)
            for answer, asking in [
                *product(answers, askings),
                *product(reversed(answers), reversed(askings)),
            ]:
                history.append(chat.assistant(answer))
                answered = self.tokenizer.render(history, tools, generate=False)
                history += asking
                whole = self.tokenizer.render(history, tools)
                rest = self._after_stand_in(asking, tools)
                grows = rest is not None and (
                    whole == so_far + answer + rest
                    # or it puts the answer in words of its own, and keeps to them
                    or (answered.startswith(so_far) and whole == answered + rest.removeprefix(closing))
                )
                if not grows or not answered.endswith(closing):
                    return f"{'+'.join(m['role'] for m in asking)} after an answer"
                so_far = whole
        except EnvError as error:
            return str(error)
        return ""


class Conversation:
    """One rollout's messages, and what their ids say. `plan` changes nothing; `commit` records a turn."""

    __slots__ = ("_answer", "_bridge", "_end", "_flags", "_pieces", "_shown", "messages", "tools")

    def __init__(self, bridge: Bridge) -> None:
        self.messages: list[ChatMessage] = []
        """Everything said so far, the model's answers included. Not to be changed."""
        self.tools: Tools | None = None
        self._bridge = bridge
        self._flags = 0
        self._pieces: list[str | Ids] = []  # all ids so far: prompts as text, answers as sampled
        self._end: int | None = None  # the end token, if the last answer ended with one
        self._answer = ""
        self._shown = ""

    def plan(self, new: Sequence[ChatMessage], tools: Tools | None = None) -> Plan:
        """The prompt after `new` was said; `tools` None keeps the tools there were, an empty list takes them away.

        EnvError when the template refuses the messages or they are not JSON-like.
        """
        said = list(new)
        if not said:
            raise EnvError("a model call needs at least one new message: the model has spoken last")
        if not self.messages:
            return self._open(said, tools, "")
        if tools is not None and chat.key_of_tools(tools) != chat.key_of_tools(self.tools):
            return self._open([*self.messages, *said], tools, "the tool list changed")
        return self._extend(said)

    def plan_whole(self, messages: Sequence[ChatMessage], tools: Tools | None = None) -> Plan:
        """The prompt of a conversation given whole: an extension if it begins with the recorded one."""
        said, known = list(messages), len(self.messages)
        if known and len(said) > known and self._begins(said):
            if chat.key_of_tools(tools) == chat.key_of_tools(self.tools):
                return self._extend(said[known:])
            return self._open(said, tools, "the tool list changed")
        return self._open(said, tools, "the history was rewritten" if known else "")

    def commit(self, plan: Plan, sampled: Ids, end: int | None, text: str, shown: str | None = None) -> None:
        """Record a turn: `plan` was sent, `sampled` came back.

        `end` is the sampled end token, None if the answer does not end with one. `text` is the answer as history
        has it, without the end token; `shown` the one the caller was given, if that is less.
        """
        if plan.extends:
            self.messages += plan.new
            self._pieces += [plan.text, sampled]
        else:
            self.messages = list(plan.messages or ())
            self._pieces = [plan.text, sampled]
            self.tools = plan.tools
        self.messages.append(chat.assistant(text))
        self._flags = plan.flags | self._bridge.flags_of_answer(text)
        self._end = end
        self._answer = text
        self._shown = text if shown is None else shown

    def answer_as(self, message: ChatMessage) -> None:
        """Put the last answer into history in another form, its text parsed into tool calls, say.

        The sampled ids stand. EnvError when the model has not spoken last.
        """
        if not self.messages or message.get("role") != "assistant":
            raise EnvError("only an assistant message may stand for the model's last answer")
        self.messages[-1] = message
        self._flags |= self._flags_of(message, first=False)

    def _begins(self, said: list[ChatMessage]) -> bool:
        known = self.messages
        if not all(map(chat.same, known[:-1], said)):
            return False
        answer, theirs = known[-1], said[len(known) - 1]
        return chat.same(answer, theirs) or chat.same({**answer, "content": self._shown}, theirs)

    def _open(self, said: list[ChatMessage], tools: Tools | None, why: str) -> Plan:
        flags = _TOOLS if tools else 0
        for at, message in enumerate(said):
            flags |= self._flags_of(message, first=at == 0)
        try:
            return self._bridge.opening(said, tools, flags, why)
        except (TypeError, KeyError) as error:
            raise EnvError(f"messages must be JSON-like and have a role: {error}") from error

    def _extend(self, new: list[ChatMessage]) -> Plan:
        flags = self._flags
        for message in new:
            flags |= self._flags_of(message, first=False)
        try:
            if self._bridge.is_append_only(flags):
                plan = self._bridge.local(new, self.tools, flags, self._end)
                if plan is not None:
                    return plan
            return self._extend_in_full(new, flags)
        except (TypeError, KeyError) as error:
            raise EnvError(f"messages must be JSON-like and have a role: {error}") from error

    def _flags_of(self, message: ChatMessage, *, first: bool) -> int:
        role = message.get("role")
        if not chat.is_plain(message):
            return _OTHER
        if role == "user":
            return 0
        if role == "tool":
            return _TOOL_ROLE
        if role == "assistant":
            return self._bridge.flags_of_answer(message["content"])
        return _SYSTEM if role == "system" and first else _OTHER

    def _extend_in_full(self, new: list[ChatMessage], flags: int) -> Plan:
        tokenizer = self._bridge.tokenizer
        whole = [*self.messages, *new]
        text = tokenizer.render(whole, self.tools)
        so_far = "".join(
            p if isinstance(p, str) else tokenizer.decode(p, keep_special=True) for p in self._pieces
        )
        if text.startswith(so_far):
            added: str | None = text[len(so_far) :]
        else:
            added = self._added_to_canonical(text)
        if added is None:
            why = "the chat template renders this history in another way than before"
            return Plan(text, whole, self.tools, flags, None, whole, why)
        return Plan(added, new, self.tools, flags, anchor=self._end)

    def _added_to_canonical(self, text: str) -> str | None:
        """What `text` adds to the rendering of the conversation so far, where that differs from what was sampled.

        A template that trims an answer, say, renders it in other words than it was sampled. As long as its own
        rendering only grows, the sampled ids may stand, and what comes after them is what comes after the answer.
        """
        tokenizer = self._bridge.tokenizer
        answered = tokenizer.render(self.messages, self.tools, generate=False)
        asked = tokenizer.render(self.messages[:-1], self.tools)
        if not (text.startswith(answered) and answered.startswith(asked)):
            return None
        closing = self._closing_of(answered[len(asked) :], self._answer)
        return None if closing is None else self._bridge.less_end(closing, self._end) + text[len(answered) :]

    def _closing_of(self, answer: str, content: str) -> str | None:
        if answer.startswith(content):
            return answer[len(content) :]
        tokens = [self._bridge.tokenizer.token(i) for i in self._bridge.tokenizer.stop_ids]
        at = max((answer.rfind(token) for token in tokens if token), default=-1)
        return answer[at:] if at >= 0 else None


class AppendOnly(msgspec.Struct, frozen=True):
    """What a start-up check found out about a chat template."""

    holds: bool
    """Whether plain multi-turn conversations only ever grow."""
    breaks: tuple[str, ...]
    """Kinds of conversation that do not, in words."""
    summary: str
    """What it means for a run, in words."""


def probe_append_only(tokenizer: ChatTokenizer) -> AppendOnly:
    """Try out which conversations the template extends, and say what follows from it. Takes milliseconds."""
    bridge = Bridge(tokenizer)
    base = not bridge._first_break(0)
    broken = [] if base else ["plain turns"]
    broken += [word for bit, word in _WORDS.items() if base and bridge._first_break(bit)]
    if not broken:
        summary = "append-only: every later turn extends the ids so far, and a rollout makes one sample"
    elif base:
        summary = (
            f"append-only, but not with {' or '.join(broken)}: such turns are rendered in full each time "
            "(slower), and where the rendering rewrites what was said before, the rollout goes on in a new "
            "sample with its whole prompt (more prefill, more samples; nothing is lost)"
        )
    else:
        summary = (
            "not append-only: each turn is rendered in full, and where that rewrites what was said before, "
            "the rollout goes on in a new sample with its whole prompt (up to one sample a turn, and as much "
            "more prefill; nothing is lost). A template that keeps history as it was avoids this: set "
            "model.chat_template"
        )
    return AppendOnly(holds=base, breaks=tuple(broken), summary=summary)


class _Cache:
    """Least recently used entries go first, by number and by characters held."""

    __slots__ = ("_chars", "_entries", "_max_chars", "_max_entries")

    def __init__(self, max_entries: int, max_chars: int) -> None:
        self._entries: dict[Hashable, tuple[Ids, str]] = {}
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._chars = 0

    def get(self, key: Hashable) -> tuple[Ids, str] | None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._entries[key] = found
        return found

    def put(self, key: Hashable, value: tuple[Ids, str], chars: int) -> None:
        if key in self._entries or chars > self._max_chars // 4:
            return
        self._entries[key] = value
        self._chars += chars
        while len(self._entries) > self._max_entries or self._chars > self._max_chars:
            oldest = next(iter(self._entries))
            self._chars -= len(self._entries.pop(oldest)[1])
