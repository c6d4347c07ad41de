"""The start-up check of a chat template: what it extends, what it rewrites, and what follows from that."""

from __future__ import annotations

import msgspec

from paceline.tokens.bridge import Bridge
from paceline.tokens.kinds import BESIDE, CALLS, REASONING, TOOL_ID, TOOL_ROLE, TOOLS, WORDS
from paceline.tokens.tokenizer import ChatTokenizer

_CALLED = TOOLS | CALLS | TOOL_ID | TOOL_ROLE
_NEEDS = {_CALLED: "tool_calls", _CALLED | BESIDE: "tool_calls", REASONING: "reasoning_content"}
"""A template that does not mention these knows nothing of such conversations, and need not be told about them."""


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
    base = not bridge.first_break(0)
    broken = [] if base else ["plain turns"]
    source = tokenizer.template_source
    kinds = {bits: words for bits, words in WORDS.items() if _NEEDS.get(bits, "") in source}
    broken += [words for bits, words in kinds.items() if base and bridge.first_break(bits)]
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
