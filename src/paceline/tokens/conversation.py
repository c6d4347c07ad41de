"""Conversations of one rollout, as a tree of turns, and what their ids say.

A node is a turn: what was said before it, and the model's answer. A prompt goes on from a node (its ids are the
node's and new ones) or opens a branch of its own. Usually there is one path. A history that goes on from an earlier
turn forks the tree there; one that was rewritten grows a new root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.errors import EnvError
from paceline.tokens import messages as chat
from paceline.tokens.bridge import Bridge
from paceline.tokens.kinds import TOOLS
from paceline.tokens.messages import ChatMessage, Tools
from paceline.tokens.plan import Ids, Plan


class Node:
    """One turn, once it has ended."""

    __slots__ = (
        "answer",
        "children",
        "content",
        "count",
        "end",
        "flags",
        "parent",
        "sampled",
        "shown",
        "text",
        "tools",
        "tools_key",
        "turn",
    )

    def __init__(self, parent: Node | None, plan: Plan, sampled: Ids, end: int | None, content: str) -> None:
        self.parent = parent
        self.turn = 0
        """Its number among the rollout's turns."""
        self.text = plan.text
        """What was added before the answer, as text."""
        self.sampled = sampled
        self.end = end
        """The end token, if the answer ended with one."""
        self.content: tuple[ChatMessage, ...] = tuple(plan.new if plan.extends else plan.messages or ())
        """The messages before the answer: those that are new, or all in a branch of its own."""
        self.answer: ChatMessage = chat.assistant(content)
        self.shown = content
        """The answer's text as the caller was given it."""
        self.count: int = len(self.content) + 1 + (parent.count if parent else 0)
        """Messages up to the answer."""
        self.tools: Tools | None = parent.tools if parent else plan.tools
        self.tools_key: bytes = parent.tools_key if parent else chat.key_of_tools(plan.tools)
        self.flags = plan.flags
        self.children: list[Node] = []

    def path(self) -> list[Node]:
        """From the branch's first turn to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def messages(self) -> list[ChatMessage]:
        """Everything said up to here, the answers included."""
        return [message for node in self.path() for message in (*node.content, node.answer)]


class Conversation:
    """`plan` and `plan_whole` change nothing; `commit` records a turn."""

    __slots__ = ("_bridge", "_roots", "tip")

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._roots: list[Node] = []
        self.tip: Node | None = None
        """The latest turn."""

    @property
    def messages(self) -> list[ChatMessage]:
        """Everything said so far in the latest branch, the model's answers included."""
        return [] if self.tip is None else self.tip.messages()

    @property
    def tools(self) -> Tools | None:
        """The latest branch's."""
        return None if self.tip is None else self.tip.tools

    # ── the next prompt ──

    def plan(self, new: Sequence[ChatMessage], tools: Tools | None = None) -> Plan:
        """The prompt after `new` was said; `tools` None keeps the tools there were, an empty list takes them away.

        EnvError when the template refuses the messages or they are not JSON-like.
        """
        said = list(new)
        if not said:
            raise EnvError("a model call needs at least one new message: the model has spoken last")
        if self.tip is None:
            return self._open(said, tools, "")
        if tools is not None and _key(tools) != self.tip.tools_key:
            return self._open([*self.messages, *said], tools, "the tool list changed")
        return self._extend(self.tip, said)

    def plan_whole(self, messages: Sequence[ChatMessage], tools: Tools | None = None) -> Plan:
        """The prompt of a conversation given whole: goes on from the deepest turn that it begins with."""
        said = list(messages)
        if not said:
            raise EnvError("a conversation of no messages was given: there is nothing to answer")
        key = _key(tools)
        base = self._deepest(said, key)
        if base is not None:
            return self._extend(base, said[base.count :])
        why = ""
        if self._roots:
            others = any(self._deepest(said, root.tools_key) for root in self._roots if root.tools_key != key)
            why = "the tool list changed" if others else "the history was rewritten"
        return self._open(said, tools, why)

    def _deepest(self, said: list[ChatMessage], tools_key: bytes) -> Node | None:
        """The deepest turn whose history `said` begins with and goes beyond; of equals the latest."""
        best: Node | None = None
        open_nodes = [root for root in self._roots if root.tools_key == tools_key]
        while open_nodes:
            node = open_nodes.pop()
            at = node.count - 1
            if len(said) <= at + 1 or (best is not None and node.count < best.count and not node.children):
                continue
            if not _says(node, said, at):
                continue
            if (
                best is None
                or node.count > best.count
                or (node.count == best.count and node.turn > best.turn)
            ):
                best = node
            open_nodes += node.children
        return best

    # ── recording ──

    def commit(self, plan: Plan, sampled: Ids, end: int | None, text: str, shown: str | None = None) -> Node:
        """Record a turn: `plan` was sent, `sampled` came back. Returns it.

        `end` is the sampled end token, None if the answer does not end with one. `text` is the answer as history
        has it, without the end token; `shown` the one the caller was given, if that is less.
        """
        parent = plan.base if plan.extends else None
        node = Node(parent, plan, sampled, end, text)
        node.flags |= self._bridge.kinds.of_answer(text)
        if shown is not None:
            node.shown = shown
        (self._roots if parent is None else parent.children).append(node)
        self.tip = node
        return node

    def answer_as(self, message: ChatMessage) -> None:
        """Put the last answer into history in another form, its text parsed into tool calls, say.

        The sampled ids stand. EnvError when the model has not spoken last.
        """
        if self.tip is None or message.get("role") != "assistant":
            raise EnvError("only an assistant message may stand for the model's last answer")
        before = self.tip.parent.flags if self.tip.parent else 0
        for said in self.tip.content:
            before |= self._bridge.kinds.of(said)
        self.tip.answer = message
        content = message.get("content")
        self.tip.shown = content if isinstance(content, str) else ""
        self.tip.flags = (TOOLS if self.tip.tools else 0) | before | self._bridge.kinds.of(message)

    # ── how ──

    def _open(self, said: list[ChatMessage], tools: Tools | None, why: str) -> Plan:
        flags = TOOLS if tools else 0
        for at, message in enumerate(said):
            flags |= self._bridge.kinds.of(message, first=at == 0)
        try:
            return self._bridge.opening(said, tools, flags, why)
        except (TypeError, KeyError) as error:
            raise EnvError(f"messages must be JSON-like and have a role: {error}") from error

    def _extend(self, base: Node, new: list[ChatMessage]) -> Plan:
        flags = base.flags
        for message in new:
            flags |= self._bridge.kinds.of(message)
        try:
            if self._bridge.is_append_only(flags):
                plan = self._bridge.local(base.answer, new, base.tools, flags, base.end)
                if plan is not None:
                    plan.base = base
                    return plan
            return self._extend_in_full(base, new, flags)
        except (TypeError, KeyError) as error:
            raise EnvError(f"messages must be JSON-like and have a role: {error}") from error

    def _extend_in_full(self, base: Node, new: list[ChatMessage], flags: int) -> Plan:
        bridge = self._bridge
        tokenizer = bridge.tokenizer
        history = base.messages()
        whole = [*history, *new]
        text = tokenizer.render(whole, base.tools)
        spans = bridge.spans(text, whole, base.tools)
        so_far = "".join(_texts(base, bridge))
        if text.startswith(so_far):
            added: str | None = text[len(so_far) :]
        else:
            added = self._added_to_canonical(base, history, text)
        if added is None:
            why = "the chat template renders this history in another way than before"
            return Plan(text, whole, base.tools, flags, messages=whole, why=why, spans=spans)
        before = len(text) - len(added)
        kept = [(role, start - before, end - before) for role, start, end in spans if start >= before]
        return Plan(added, new, base.tools, flags, base=base, spans=kept, anchor=base.end)

    def _added_to_canonical(self, base: Node, history: list[ChatMessage], text: str) -> str | None:
        """What `text` adds to the rendering of the conversation so far, where that differs from what was sampled.

        A template that trims an answer, say, renders it in other words than it was sampled. As long as its own
        rendering only grows, the sampled ids may stand, and what comes after them is what comes after the answer.
        """
        bridge = self._bridge
        asked = bridge.tokenizer.render(history[:-1], base.tools)
        added = bridge.after_answer(text, asked, history[-1], base.end, base.tools)
        if added is not None:
            return added
        # In words of its own, and it keeps to them.
        answered = bridge.tokenizer.render(history, base.tools, generate=False)
        closing = bridge.closing(base.tools)
        if closing is None or not (text.startswith(answered) and answered.startswith(asked)):
            return None
        if not answered.endswith(closing):
            return None
        end = bridge.tokenizer.token(base.end) if base.end is not None else ""
        at = closing.find(end) if end else -1
        return (closing if at < 0 else closing[at + len(end) :]) + text[len(answered) :]


def _says(node: Node, said: list[ChatMessage], at: int) -> bool:
    """Whether `said` has the node's own messages where they belong; `at` is where its answer would stand."""
    start = at - len(node.content)
    for mine, theirs in zip(node.content, said[start:at], strict=True):
        if not chat.same(mine, theirs):
            return False
    answer, theirs = node.answer, said[at]
    return chat.same_answer(answer, theirs) or chat.same_answer({**answer, "content": node.shown}, theirs)


def _texts(base: Node, bridge: Bridge) -> Iterator[str]:
    for node in base.path():
        yield node.text
        yield bridge.tokenizer.decode(node.sampled, keep_special=True)


def _key(tools: Tools | None) -> bytes:
    try:
        return chat.key_of_tools(tools)
    except TypeError as error:
        raise EnvError(f"tools must be JSON-like: {error}") from error
