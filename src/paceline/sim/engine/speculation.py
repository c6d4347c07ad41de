"""Speculative decoding: several tokens a pass of the model, some drafted and verified together.

A pass over B sequences with g drafted tokens each takes D(B, g) to draft and T(B, g) to verify. Of the drafts those before the
first wrong one are kept, and the model's own token behind them: 1 + a + ... + a^g tokens on average, where a is how likely a
draft is right. So a token takes

    T_SD(g) = (1 - a) (D(B, g) + T(B, g)) / (1 - a^(g + 1))

(Seer, arXiv:2511.14617v3). g is chosen for each stretch so that this is least, and is 0 for batches for which drafting does
not pay. Drafts come from the sequence itself and from what its group has answered so far, its references: the more of
them, the more drafts are right.

The engine model samples one token a sequence and step, and its closed form rests on that. A pass is therefore cut into as
many steps as it samples tokens, each with its share of the pass's seconds: the tokens of a batch come at the right pace,
and all its sequences at the same one, that of their mean a.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from paceline.config.base import Section

if TYPE_CHECKING:
    from paceline.sim.engine.speed import Speed

UNIT: Final = 1_000_000
"""Probabilities are counted in millionths, so that what joins a batch and leaves it again leaves nothing behind."""


class Accepted(Section):
    """What was measured with so many references."""

    references: int = Field(ge=0)
    """Other answers of the group that drafts are taken from."""
    tokens: float = Field(ge=1)
    """Mean tokens of a pass, the model's own included."""


SEER: Final = (
    Accepted(references=0, tokens=1.70),
    Accepted(references=1, tokens=2.04),
    Accepted(references=5, tokens=2.32),
    Accepted(references=15, tokens=2.53),
)
"""One draft a sequence ("linear"), as Seer measured it. It does not say with how many drafted tokens; 8 is the most that its
scheduler takes."""


class Speculation(Section):
    """How an engine speculates."""

    most: int = Field(default=8, ge=1, le=64)
    """Most tokens drafted for a sequence in a pass."""
    accepted: tuple[Accepted, ...] = Field(default=SEER, min_length=1)
    """Mean tokens of a pass by references, fewest first; between two of them evenly in the logarithm of 1 + references."""
    accepted_of: int = Field(default=8, ge=1, le=64)
    """Drafted tokens that `accepted` was measured with."""
    references: Literal["none", "group"] = "group"
    """Whether drafts are taken from the other answers of a group, or from the sequence alone. The others are counted anew at
    each engine request: those that have begun."""
    off_above: int | None = Field(default=None, ge=1)
    """Sequences above which nothing is drafted, whether or not it would pay; none: it is always weighed."""
    draft_s: float = Field(default=0.0, ge=0)
    """Seconds to draft one token for all sequences: a pass of a small model."""
    draft_seq_s: float = Field(default=0.0, ge=0)
    """Seconds to draft and judge one token of one sequence: a look-up."""

    @model_validator(mode="after")
    def _can_be(self) -> Speculation:
        for fewer, more in pairwise(self.accepted):
            if more.references <= fewer.references:
                raise ValueError(
                    f"accepted lists {fewer.references} references before {more.references}: order it by references, "
                    "fewest first, each once"
                )
        for each in self.accepted:
            if each.tokens >= self.accepted_of + 1:
                raise ValueError(
                    f"accepted has {each.tokens:g} tokens a pass with {each.references} references, but "
                    f"{self.accepted_of} drafted ones and the model's own are at most {self.accepted_of + 1}, and some are "
                    "wrong: raise accepted_of"
                )
        return self

    def tokens(self, references: int) -> float:
        """Mean tokens of a pass with `accepted_of` drafted ones."""
        known = self.accepted
        if self.references == "none" or references <= known[0].references:
            return known[0].tokens
        for fewer, more in pairwise(known):
            if references <= more.references:
                low, high = log(1 + fewer.references), log(1 + more.references)
                part = (log(1 + references) - low) / (high - low)
                return fewer.tokens + part * (more.tokens - fewer.tokens)
        return known[-1].tokens


class Pace(NamedTuple):
    """What a step of one token a sequence costs: a share of a pass."""

    step_s: float
    """Without reading the KV cache."""
    kv_s: float
    """A token of context."""
    tokens: float
    """Tokens of a pass."""


class Drafter:
    """Weighs how many tokens an engine drafts."""

    def __init__(self, speculation: Speculation, speed: Speed) -> None:
        self._speculation = speculation
        self._speed = speed
        self._known: list[int] = []
        """By references: how likely a draft is right, in millionths."""
        self._passes: dict[int, list[float]] = {}
        """By batch, then by drafted tokens: seconds of a pass, without reading the KV cache."""
        # The queries of a sequence read its KV once, but each computes with it.
        self._kv_s = [
            max(speed.kv_s, drafted * speed.attention_s) for drafted in range(1, speculation.most + 2)
        ]
        self._kv_s[0] = speed.kv_s

    def likelihood(self, references: int) -> int:
        """How likely a draft is right, in millionths."""
        known = self._known
        while len(known) <= references:
            speculation = self._speculation
            known.append(round(UNIT * likelihood(speculation.tokens(len(known)), speculation.accepted_of)))
        return known[references]

    def pace(self, batch: int, context: float, likely: int) -> Pace:
        """For `batch` sequences with `context` tokens in all, whose likelihoods add up to `likely` millionths."""
        passes = self._passes.get(batch)
        if passes is None:
            passes = self._passes[batch] = self._weigh(batch)
        right = likely / (UNIT * batch)
        best = Pace(passes[0], self._kv_s[0], 1.0)
        least = passes[0] + self._kv_s[0] * context
        tokens, part = 1.0, right
        for drafted in range(1, len(passes)):
            tokens += part
            part *= right
            pass_s, kv_s = passes[drafted], self._kv_s[drafted]
            took = (pass_s + kv_s * context) / tokens
            if took < least:
                best, least = Pace(pass_s / tokens, kv_s / tokens, tokens), took
        return best

    def _weigh(self, batch: int) -> list[float]:
        speculation, speed = self._speculation, self._speed
        most = speculation.most
        if speculation.off_above is not None and batch > speculation.off_above:
            most = 0
        most = min(most, max(0, speed.max_batched_tokens // batch - 1))
        fixed = speed.overhead_s + batch * speed.seq_s
        draft = speculation.draft_s + batch * speculation.draft_seq_s
        return [
            speed.gemm_s(batch, batch * (1 + drafted)) + fixed + drafted * draft
            for drafted in range(most + 1)
        ]


def likelihood(tokens: float, drafted: int) -> float:
    """How likely a draft is right, if a pass with `drafted` of them samples `tokens` on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if pass_tokens(middle, drafted) < tokens:
            low = middle
        else:
            high = middle
    return low


def pass_tokens(right: float, drafted: int) -> float:
    """1 + a + ... + a^g."""
    return sum([right**power for power in range(drafted + 1)])
