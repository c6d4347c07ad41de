"""What of an answer can be shown while it is sampled: text that will be shown whatever is sampled after it.

Ids become text once the characters are whole. Text is held back while it may be the beginning of a tool call or a stop
string, or of what stands around thinking; from a tool call on, everything waits for the end, where the answer is read
as a whole. So what is shown early is the beginning of what `read_answer` then finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

from paceline.tokens.marks import first_mark, sure_of
from paceline.tokens.tokenizer import ChatTokenizer
from paceline.tokens.tool_calls import BEGINNINGS, PYTHON_TAG, thought

Kind: TypeAlias = Literal["text", "thinking"]
State: TypeAlias = Literal["opening", "thinking", "content", "closed"]

_PATIENCE: Final = 0.25
"""Bytes that are no text are looked at again after this share of them more, so that a long run of them costs little."""


class _Decoder:
    """Ids to text, piece by piece: together the pieces are what `decode` makes of all ids at once."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """Those of the latest piece, which what follows is decoded with (a first word may lose its space), and those
        that are no piece yet."""
        self._known = 0
        """How many of them are of that piece."""
        self._wait = 0
        """How many of them there must be before it is tried again."""

    def step(self, ids: Sequence[int]) -> str:
        self._ids += ids
        if len(self._ids) < self._wait:
            return ""
        whole = self._tokenizer.decode(self._ids)
        if whole.endswith("\ufffd"):
            unknown = len(self._ids) - self._known
            self._wait = len(self._ids) + 1 + int(_PATIENCE * unknown)
            return ""
        piece = whole[len(self._tokenizer.decode(self._ids[: self._known])) :]
        if piece:  # of none the ids must stay: what was before them is still needed
            self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return piece


class Spoken:
    """One answer on its way."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        show: Callable[[Kind, str], None],
        *,
        format: str,
        has_tools: bool,
        split: bool,
        stops: Sequence[str],
    ) -> None:
        """`show` is told each piece. `format`, `has_tools` and `split`: how the answer will be read; `stops`: every string
        that ends it."""
        self._tokenizer = tokenizer
        self._decoder = _Decoder(tokenizer)
        self._show = show
        self._beginning = BEGINNINGS.get(format, "") if has_tools else ""
        self._split = split
        self._is_read = has_tools or split
        """Whether the answer is taken apart at its end: then space around its parts is dropped."""
        self._stops = tuple(stops)
        self._unsure = ""
        """Text that may be the beginning of a stop string."""
        self._held = ""
        """Text before any stop string that is not shown yet."""
        self._end_tag = ""
        self._state: State = "opening" if split else "content"
        if format == "harmony" and (has_tools or split):
            self._state = "closed"
        self.text = ""
        """Content shown so far."""
        self.thinking = ""

    def take(self, ids: Sequence[int]) -> None:
        """More was sampled."""
        if self._state == "closed":
            return
        if self._is_read and any(
            map(self._tokenizer.is_special, [id_ for id_ in ids if id_ not in self._tokenizer.stop_ids])
        ):
            # The answer is read with its special tokens, which mark calls in some families: nothing after one is sure.
            self._state = "closed"
            return
        self._unsure += self._decoder.step([id_ for id_ in ids if id_ not in self._tokenizer.stop_ids])
        stop = first_mark(self._unsure, self._stops)
        sure = sure_of(self._unsure, self._stops) if stop is None else stop
        self._held += self._unsure[:sure]
        self._unsure = self._unsure[sure:]
        if self._state == "opening":
            self._open()
        if self._state == "thinking":
            self._think()
        if self._state == "content":
            self._say()
        if stop is not None:
            self._state = "closed"

    def _open(self) -> None:
        """Where thinking is split off, the answer begins with it, the opening tag in the prompt perhaps; or with none, which
        only its end shows."""
        found = thought(self._held)
        if found is not None:
            start, self._end_tag = found
            self._held, self._state = self._held[start:], "thinking"

    def _think(self) -> None:
        head, found, rest = self._held.partition(self._end_tag)
        if not self.thinking:
            head = head.lstrip()
        sure = head.rstrip() if found else head[: sure_of(head, (self._end_tag,))].rstrip()
        if sure:
            self.thinking += sure
            self._show("thinking", sure)
        self._held = rest if found else head[len(sure) :]
        if found:
            self._state = "content"

    def _say(self) -> None:
        held = self._held
        if self._split and not self.text:
            held = held.lstrip("\n")
        if self._beginning == "{" and not self.text and _may_be_json(held):
            self._held = held
            return
        marks = (self._beginning,) if self._beginning not in ("", "{") else ()
        end = first_mark(held, marks)
        if end is not None:
            self._state = "closed"
        sure = held[: sure_of(held, marks) if end is None else end]
        if self._is_read:
            sure = sure.rstrip()
        if sure:
            self.text += sure
            self._show("text", sure)
        self._held = held[len(sure) :]


def goes_on(shown: str, read: str) -> str:
    """What was answered of one kind, `shown` being what a stream has shown of it and `read` what the end made of it.

    Space in front may have been shown before there was a call to drop it for. Anything else is an answer that is read in
    two ways, because its engine told one and returned another, say: what the program was shown is then what it was answered.
    """
    if read.startswith(shown):
        return read
    spaced = shown[: len(shown) - len(shown.lstrip())] + read
    return spaced if spaced.startswith(shown) else shown


def _may_be_json(text: str) -> bool:
    """Whether Llama's calls may begin with this, which is the beginning of an answer."""
    bare = text.replace(PYTHON_TAG, "").lstrip()
    return bare.startswith("{") or PYTHON_TAG.startswith(bare)
