"""Prompts that extend exactly the ids so far.

A conversation's ids are never made twice. The first prompt is rendered and encoded whole. After the model has
answered, a further prompt is the ids so far (prompt and sampled ids, as they were) followed by new ones, which
stand for: what the template closes an assistant message with, less what the model has sampled of it; the new
messages; the header of the next answer.

Two ways lead to those new ids:

- *local*: the new messages are rendered behind a stand-in for the conversation, so the cost does not depend on
  its length. Right whenever the template is append-only for this kind of conversation, which `Bridge` tries out
  once for each kind (tools or not, calls or not, thinking or not, …) before it relies on it.
- *in full*: the whole conversation is rendered, and what it adds to the text so far is encoded. Where it does not
  extend the text so far (the template strips old thinking, say), the prompt is the full rendering and begins a
  new branch.
"""

from __future__ import annotations

from collections.abc import Hashable

from paceline.errors import EnvError
from paceline.tokens import messages as chat
from paceline.tokens.kinds import OTHER, STAND_IN, Kinds
from paceline.tokens.messages import ChatMessage, Tools
from paceline.tokens.plan import Ids, Plan, Roles, Spans, marked, roles_of, spans_of
from paceline.tokens.tokenizer import ChatTokenizer

_CACHE_ENTRIES, _CACHE_CHARS = 4096, 16_000_000
"""Encoded prompts kept for reuse: the members of a group share their first, and observations repeat."""

_PATTERNS = 256
"""Shapes of new messages that are remembered: roles, tools and end tokens are few."""

_ASK = chat.user("~ask~")
_STANDING_IN = chat.assistant(STAND_IN)


class Bridge:
    """What is shared by all conversations of one tokenizer: its template's manners, and a cache."""

    __slots__ = (
        "_append_only",
        "_asked",
        "_cache",
        "_closing",
        "_patterns",
        "_stops",
        "kinds",
        "tokenizer",
    )

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.kinds = Kinds(tokenizer)
        self._append_only: dict[int, bool] = {}
        self._cache = _Cache(_CACHE_ENTRIES, _CACHE_CHARS)
        self._asked: dict[bytes, str] = {}
        self._patterns: dict[Hashable, str | None] = {}
        self._closing: dict[bytes, str | None] = {}
        self._stops = tuple(text for i in tokenizer.stop_ids if (text := tokenizer.token(i)))

    # ── ids ──

    def encode(self, plan: Plan) -> Ids:
        """Fill in `plan.ids` and `plan.roles`; returns the ids."""
        return self.settle(plan, *self.tokenize(plan)) if plan.ids is None else plan.ids

    def tokenize(self, plan: Plan) -> tuple[Ids, Roles]:
        """Ids and roles of a plan. Touches nothing else, so it may run in a thread when the text is long."""
        # Encoded behind the end token that was sampled: some tokenizers put a space in front of whatever they
        # are given first, and none of them merges anything across a special token.
        places = [(start, end) for _, start, end in plan.spans]
        if plan.anchor is not None:
            before = self.tokenizer.token(plan.anchor)
            shifted = [(start + len(before), end + len(before)) for start, end in places]
            ids, firsts = self.tokenizer.encode_with_places(before + plan.text, shifted)
            if len(ids) and ids[0] == plan.anchor:
                firsts = [(max(first - 1, 0), end - 1) for first, end in firsts]
                return ids[1:], roles_of(plan.spans, firsts, len(ids) - 1)
        ids, firsts = self.tokenizer.encode_with_places(plan.text, places)
        return ids, roles_of(plan.spans, firsts, len(ids))

    def settle(self, plan: Plan, ids: Ids, roles: Roles) -> Ids:
        """Note what `tokenize` made of a plan, for it and for its like."""
        plan.ids, plan.roles = ids, roles
        if plan.key is not None:
            self._cache.put(plan.key, (ids, plan.text, roles, plan.spans), len(plan.text))
        return ids

    # ── plans ──

    def opening(self, messages: list[ChatMessage], tools: Tools | None, flags: int, why: str) -> Plan:
        """A whole prompt."""
        key = ("open", chat.key_of(messages), chat.key_of_tools(tools))
        found = self._cache.get(key)
        if found is not None:
            ids, text, roles, spans = found
            return Plan(
                text, messages, tools, flags, messages=messages, why=why, spans=spans, ids=ids, roles=roles
            )
        text = self.tokenizer.render(messages, tools)
        spans = self.spans(text, messages, tools)
        return Plan(text, messages, tools, flags, messages=messages, why=why, spans=spans, key=key)

    def local(
        self, answer: ChatMessage, new: list[ChatMessage], tools: Tools | None, flags: int, end: int | None
    ) -> Plan | None:
        """What `new` adds after `answer`, rendered behind a stand-in for what was before; None if the template
        cannot do that. A plain answer has a stand-in too."""
        plain = chat.is_plain(answer)
        key: Hashable = None
        if plain:
            key = ("local", chat.key_of(new), chat.key_of_tools(tools), end)
            found = self._cache.get(key)
            if found is not None:
                ids, text, roles, spans = found
                return Plan(text, new, tools, flags, spans=spans, ids=ids, roles=roles)
            answer = _STANDING_IN
        said = self.rest(answer, new, tools, end)
        if said is None:
            return None
        pattern = (
            self._pattern(answer, new, tools, end) if plain else self.rest(answer, marked(new), tools, end)
        )
        spans = spans_of(said, pattern, new) if pattern is not None else ()
        return Plan(said, new, tools, flags, spans=spans, anchor=end, key=key)

    def _pattern(
        self, answer: ChatMessage, new: list[ChatMessage], tools: Tools | None, end: int | None
    ) -> str | None:
        """Where the contents of `new` go, after a plain answer: the same for all messages of the same roles."""
        if not all(map(chat.is_plain, new)):
            return self.rest(answer, marked(new), tools, end)
        key = (tuple((m["role"], m["content"].strip() != "") for m in new), chat.key_of_tools(tools), end)
        if key not in self._patterns:
            if len(self._patterns) >= _PATTERNS:
                self._patterns.clear()
            self._patterns[key] = self.rest(answer, marked(new), tools, end)
        return self._patterns[key]

    def spans(self, text: str, messages: list[ChatMessage], tools: Tools | None) -> Spans:
        """Where a whole rendering has the messages' own words."""
        try:
            pattern = self.tokenizer.render(marked(messages), tools)
        except EnvError:  # it looks into contents, and refuses the marks
            return ()
        return spans_of(text, pattern, messages)

    # ── what a template does ──

    def is_append_only(self, flags: int) -> bool:
        """Whether conversations of this kind can be extended locally; tried out once for each kind."""
        if flags & OTHER:
            return False
        known = self._append_only.get(flags)
        if known is None:
            known = self._append_only[flags] = not self.first_break(flags)
        return known

    def first_break(self, flags: int) -> str:
        """Extend a made-up conversation of this kind; returns what the first turn was that differs, else nothing."""
        history, turns, tools = self.kinds.example(flags)
        try:
            so_far = self.tokenizer.render(history, tools)
            for answer, asking in turns:
                history += [answer, *asking]
                whole = self.tokenizer.render(history, tools)
                standing = _STANDING_IN if chat.is_plain(answer) else answer
                alone = self._standing(standing, asking, tools)
                if alone is None:
                    return f"{'+'.join(m['role'] for m in asking)} after an answer"
                cut = () if answer.get("tool_calls") else (None,)
                for end in (*cut, *self.tokenizer.stop_ids[:1]):
                    grows = self.after_answer(whole, so_far, answer, end, tools)
                    if grows is None or grows != self.after_answer(*alone, standing, end, tools):
                        return f"{'+'.join(m['role'] for m in asking)} after an answer"
                so_far = whole
        except EnvError as error:
            return str(error)
        return ""

    def rest(
        self, answer: ChatMessage, new: list[ChatMessage], tools: Tools | None, end: int | None
    ) -> str | None:
        """What the rendering of a question, `answer` and `new` has behind the answer; None if it cannot be told."""
        alone = self._standing(answer, new, tools)
        return None if alone is None else self.after_answer(*alone, answer, end, tools)

    def _standing(
        self, answer: ChatMessage, new: list[ChatMessage], tools: Tools | None
    ) -> tuple[str, str] | None:
        """The rendering of a question, `answer` and `new`, and of the question alone; None if the template wants
        other company: the conversation is then rendered in full."""
        key = chat.key_of_tools(tools)
        try:
            if key not in self._asked:
                self._asked[key] = self.tokenizer.render([_ASK], tools)
            return self.tokenizer.render([_ASK, answer, *new], tools), self._asked[key]
        except EnvError:
            return None

    def after_answer(
        self, whole: str, asked: str, answer: ChatMessage, end: int | None, tools: Tools | None
    ) -> str | None:
        """What `whole` has behind the answer to `asked`, less the end token if that was sampled.

        None when `whole` says something else than before: the history up to the answer changed, or words of the
        answer are left out.
        """
        if not whole.startswith(asked):
            return None
        content = answer.get("content") or ""
        words = [
            text for key in ("content", "reasoning_content") if (text := (answer.get(key) or "").strip())
        ]
        # Looked for behind the words: an answer may quote an end token.
        start = len(asked)
        for text in words:
            found = whole.find(text, len(asked))
            if found < 0:
                return None
            start = max(start, found + len(text))
        stop, at = self._first_stop(whole, start)
        if any(text not in whole[len(asked) : at if at >= 0 else None] for text in words):
            return None
        if end is None or at < 0:
            if not answer.get("tool_calls") and words:
                exact = whole.startswith(content, len(asked))
                return whole[len(asked) + len(content) if exact else start :]
            # A call that was cut short: what the template closes it with cannot be told from here.
            return whole[at:] if at >= 0 and not answer.get("tool_calls") else None
        token = self.tokenizer.token(end)
        if stop == token or stop in (self.closing(tools) or ""):
            return whole[at + len(stop) :]  # the one that was sampled stands in place of the template's
        return whole[at:]

    def closing(self, tools: Tools | None) -> str | None:
        """What the template puts after the content of an assistant message; None if it cannot be told."""
        key = chat.key_of_tools(tools)
        if key not in self._closing:
            try:
                text = self.tokenizer.render([_ASK, _STANDING_IN], tools, generate=False)
                _, found, rest = text.partition(STAND_IN)
            except EnvError:
                found = rest = ""
            self._closing[key] = rest if found and STAND_IN not in rest else None
        return self._closing[key]

    def _first_stop(self, text: str, start: int) -> tuple[str, int]:
        """The first end token in `text` from `start` on, and where it stands; -1 if there is none."""
        found, at = "", -1
        for stop in self._stops:
            here = text.find(stop, start)
            if here >= 0 and (at < 0 or here < at):
                found, at = stop, here
        return found, at


class _Cache:
    """Least recently used entries go first, by number and by characters held."""

    __slots__ = ("_chars", "_entries", "_max_chars", "_max_entries")

    def __init__(self, max_entries: int, max_chars: int) -> None:
        self._entries: dict[Hashable, tuple[Ids, str, Roles, Spans]] = {}
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._chars = 0

    def get(self, key: Hashable) -> tuple[Ids, str, Roles, Spans] | None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._entries[key] = found
        return found

    def put(self, key: Hashable, value: tuple[Ids, str, Roles, Spans], chars: int) -> None:
        if key in self._entries or chars > self._max_chars // 4:
            return
        self._entries[key] = value
        self._chars += chars
        while len(self._entries) > self._max_entries or self._chars > self._max_chars:
            oldest = next(iter(self._entries))
            self._chars -= len(self._entries.pop(oldest)[1])
