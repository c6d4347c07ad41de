"""What of an answer can be shown while it is sampled: text that will be shown whatever is sampled after it.

Ids become text once the characters are whole. Text is held back while it may be the beginning of a tool call or a stop
string, or of what stands around thinking; from a tool call on, everything waits for the end, where the answer is read
as a whole. So what is shown early is the beginning of what `read_answer` then finds.

Each character is looked at a few times, however long the answer is: of what is held back, only an end that may be the
beginning of a mark is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

from paceline.errors import InvariantError
from paceline.tokens.marks import first_mark, sure_of
from paceline.tokens.tokenizer import ChatTokenizer
from paceline.tokens.tool_calls import BEGINNINGS, PYTHON_TAG, THOUGHTS, thought

Kind: TypeAlias = Literal["text", "thinking"]
Show: TypeAlias = Callable[[Kind, str], None]
State: TypeAlias = Literal["opening", "thinking", "content", "closed"]

_FEW: Final = 16
"""Ids whose text is not whole yet that are looked at whenever one more comes."""

_PATIENCE: Final = 0.25
"""More are looked at again after this share of them more, so that a long run of bytes that are no text costs little."""

_OPENINGS: Final = tuple([opening for opening, _ in THOUGHTS])
_CLOSINGS: Final = tuple([closing for _, closing in THOUGHTS])


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
        is_whole = not whole.endswith("\ufffd")
        piece = whole[len(self._tokenizer.decode(self._ids[: self._known])) :] if is_whole else ""
        if not piece:  # what was before them is still needed
            unknown = len(self._ids) - self._known
            self._wait = len(self._ids) + 1 + int(_PATIENCE * max(0, unknown - _FEW))
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        self._wait = 0
        return piece


class _Opening:
    """Text of which it is not known yet whether it is thinking. Where thinking is split off, the answer begins with it, the
    opening tag in the prompt perhaps; or with none, which only its end shows."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._begun = ""
        """What the answer begins with, as long as that may be an opening tag."""
        self._may_open = True
        self._tail = ""
        """The end, in which a closing tag may have begun."""

    def take(self, text: str) -> tuple[str, str] | None:
        """More text. The thinking so far, and the tag that ends it, once it is known to be that."""
        self._parts.append(text)
        opens, closes = self._opens(text), self._closes(text)
        if not opens and not closes:
            return None
        whole = "".join(self._parts)
        found = thought(whole)
        if found is None:
            raise InvariantError(f"an answer begins as thinking does and is none: {whole[:100]!r}")
        return whole[found[0] :], found[1]

    def _opens(self, text: str) -> bool:
        if not self._may_open:
            return False
        self._begun = (self._begun + text).lstrip()[: max(map(len, _OPENINGS))]
        self._may_open = any([opening.startswith(self._begun) for opening in _OPENINGS])
        return self._begun.startswith(_OPENINGS)

    def _closes(self, text: str) -> bool:
        window = self._tail + text
        self._tail = window[1 - max(map(len, _CLOSINGS)) :]
        return first_mark(window, _CLOSINGS) is not None


class _Told:
    """The text of one kind that is shown, in order. Space waits for what follows it, if it is dropped at an end."""

    def __init__(self, kind: Kind, show: Show, *, drops: str | None, keeps_space: bool) -> None:
        """`drops`: what is left out in front, as `str.lstrip` has it."""
        self._kind, self._show = kind, show
        self._drops, self._keeps_space = drops, keeps_space
        self._parts: list[str] = []
        self._space: list[str] = []

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._parts)

    def add(self, text: str) -> None:
        if not self._parts and not self._space:
            text = text.lstrip(self._drops)
        said = text if self._keeps_space else text.rstrip()
        if said:
            piece = "".join([*self._space, said])
            self._parts.append(piece)
            self._space = []
            self._show(self._kind, piece)
        if space := text[len(said) :]:
            self._space.append(space)


class Spoken:
    """One answer on its way."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        show: Show,
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
        self._beginning = BEGINNINGS.get(format, "") if has_tools else ""
        self._is_read = has_tools or split
        """Whether the answer is taken apart at its end: then space around its parts is dropped."""
        self._stops = tuple(stops)
        self._unsure = ""
        """Text that may be the beginning of a stop string."""
        self._held = ""
        """Text that may be the beginning of a tag or of a call."""
        self._opening = _Opening()
        self._end_tag = ""
        self._thinking = _Told("thinking", show, drops=None, keeps_space=False)
        self._content = _Told("text", show, drops="\n" if split else "", keeps_space=not self._is_read)
        self._state: State = "opening" if split else "content"
        if format == "harmony" and self._is_read:
            self._state = "closed"

    @property
    def text(self) -> str:
        """Content shown so far."""
        return self._content.text

    @property
    def thinking(self) -> str:
        """Thinking shown so far."""
        return self._thinking.text

    def take(self, ids: Sequence[int]) -> None:
        """More was sampled."""
        if self._state == "closed":
            return
        tokenizer = self._tokenizer
        sampled = [id_ for id_ in ids if id_ not in tokenizer.stop_ids]
        if self._is_read and any(map(tokenizer.is_special, sampled)):
            # The answer is read with its special tokens, which mark calls in some families: nothing after one is sure.
            self._state = "closed"
            return
        self._unsure += self._decoder.step(sampled)
        stop = first_mark(self._unsure, self._stops)
        sure = sure_of(self._unsure, self._stops) if stop is None else stop
        text, self._unsure = self._unsure[:sure], self._unsure[sure:]
        if text:
            self._tell(text)
        if stop is not None:
            self._state = "closed"

    def _tell(self, text: str) -> None:
        if self._state == "opening":
            found = self._opening.take(text)
            if found is None:
                return
            text, self._end_tag = found
            self._state = "thinking"
        if self._state == "thinking":
            text = self._until(self._thinking, text, self._end_tag, then="content")
        if self._state != "content":
            return
        if self._beginning == "{" and not self._is_no_call(text):
            return
        if self._beginning == "{":
            text, self._held, self._beginning = self._held, "", ""
        self._until(self._content, text, self._beginning, then="closed")

    def _until(self, told: _Told, text: str, mark: str, then: State) -> str:
        """Show what is before the mark, if there is one to look for. Returns what comes after it, once it is there."""
        held = self._held + text
        marks = (mark,) if mark else ()
        at = first_mark(held, marks)
        sure = sure_of(held, marks) if at is None else at
        told.add(held[:sure])
        if at is None:
            self._held = held[sure:]
            return ""
        self._held, self._state = "", then
        return held[at + len(mark) :]

    def _is_no_call(self, text: str) -> bool:
        """Llama's calls have no text before them: what an answer begins with, which is held, says whether it is one."""
        held = self._held + text
        begun = held.lstrip()
        self._content.add(held[: len(held) - len(begun)])
        self._held = begun
        if begun.startswith(("{", PYTHON_TAG)):
            self._state = "closed"
        return self._state != "closed" and not PYTHON_TAG.startswith(begun)


def goes_on(shown: str, read: str) -> str:
    """What was answered of one kind, `shown` being what a stream has shown of it and `read` what the end made of it.

    Space in front may have been shown before there was a call to drop it for. Anything else is an answer that is read in
    two ways, because its engine told one and returned another, say: what the program was shown is then what it was answered.
    """
    if read.startswith(shown):
        return read
    spaced = shown[: len(shown) - len(shown.lstrip())] + read
    return spaced if spaced.startswith(shown) else shown
