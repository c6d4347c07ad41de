"""The token account: where every sampled token and every launched rollout went, by environment and fate.

The conservation law: for each environment, tokens sampled (counted request by request, as engines answer) equal
the tokens of all fates plus those in flight and queued (counted rollout by rollout, as they settle); the same for
rollouts launched. The two sides are counted apart, so that a lost rollout or a lost token shows.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from paceline.domain.ids import EnvName
from paceline.domain.task import Split
from paceline.observe.lives import Life, LifeWatcher, Lives, Shipped

Place: TypeAlias = Literal[
    "shipped", "queued", "in_flight", "zero_signal", "filtered", "stale", "failed", "cancelled", "truncated",
    "overlong", "void", "left_over", "discarded", "deferred", "eval",
]  # fmt: skip
"""A fate, or `in_flight`. `queued`: ended and not settled yet, in an open group or in the batch list."""

PLACES: tuple[Place, ...] = (
    "shipped", "queued", "in_flight", "zero_signal", "filtered", "stale", "failed", "cancelled", "truncated",
    "overlong", "void", "left_over", "discarded", "deferred", "eval",
)  # fmt: skip
"""In the order people read them: what trained, what still may, what did not."""


class Line(msgspec.Struct, frozen=True):
    """The account of one environment, of one split."""

    env: EnvName
    split: Split
    launched: int
    """Rollouts."""
    sampled: int
    """Tokens, counted as engines answered."""
    rollouts: dict[Place, int]
    tokens: dict[Place, int]
    prefill: int
    """Prompt tokens that engines computed."""
    prefill_cached: int
    """Prompt tokens whose KV they still had."""
    prefill_recomputed: int
    """Computed although an engine had had them for the same rollout before."""

    @property
    def is_conserved(self) -> bool:
        return self.missing_tokens == 0 and self.missing_rollouts == 0

    @property
    def missing_tokens(self) -> int:
        return self.sampled - sum(self.tokens.values())

    @property
    def missing_rollouts(self) -> int:
        return self.launched - sum(self.rollouts.values())


class _Settled:
    __slots__ = ("rollouts", "tokens")

    def __init__(self) -> None:
        self.rollouts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}


class Account(LifeWatcher):
    """Keeps the account. `lives` must be folded before it is read."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._settled: dict[tuple[EnvName, Split], _Settled] = {}
        lives.watch(self)

    def on_lost(self, at: float, life: Life, tokens: int) -> None:
        lost = self._of(life).tokens
        lost["failed"] = lost.get("failed", 0) + tokens

    def _of(self, life: Life) -> _Settled:
        key = (life.env, life.split)
        if (settled := self._settled.get(key)) is None:
            settled = self._settled[key] = _Settled()
        return settled

    def on_settled(self, at: float, life: Life, shipped: Shipped | None) -> None:
        settled = self._of(life)
        fate = life.fate or "failed"
        settled.rollouts[fate] = settled.rollouts.get(fate, 0) + 1
        tokens = settled.tokens
        for place, count in split_tokens(life, shipped):
            tokens[place] = tokens.get(place, 0) + count

    def lines(self) -> list[Line]:
        """One line an environment and split, train first. Walks what has not settled."""
        unsettled: dict[tuple[EnvName, Split], _Settled] = {}
        for life in self._lives.unsettled.values():
            open_ = unsettled.setdefault((life.env, life.split), _Settled())
            place = "in_flight" if life.ended is None else "queued"
            open_.rollouts[place] = open_.rollouts.get(place, 0) + 1
            open_.tokens[place] = open_.tokens.get(place, 0) + life.tokens
        nothing = _Settled()
        lines = []
        for key in sorted(self._lives.tallies, key=lambda key: (key[1] != "train", key[0])):
            tally = self._lives.tallies[key]
            done, open_ = self._settled.get(key, nothing), unsettled.get(key, nothing)
            lines.append(
                Line(
                    env=key[0],
                    split=key[1],
                    launched=tally.launched,
                    sampled=tally.sampled,
                    rollouts=_places(done.rollouts, open_.rollouts),
                    tokens=_places(done.tokens, open_.tokens),
                    prefill=tally.prefill,
                    prefill_cached=tally.cached,
                    prefill_recomputed=tally.recomputed,
                )
            )
        return lines

    def settled_tokens(self) -> dict[str, int]:
        """Tokens by fate over all environments, evals included, of what has settled so far. Cheap."""
        totals: dict[str, int] = {}
        for settled in self._settled.values():
            for place, count in settled.tokens.items():
                totals[place] = totals.get(place, 0) + count
        return totals

    def goodput(self) -> float | None:
        """See the function `goodput`; without walking what has not settled."""
        sampled = sum(tally.sampled for (_, split), tally in self._lives.tallies.items() if split == "train")
        shipped = sum(entry.tokens.get("shipped", 0) for entry in self._settled.values())
        return shipped / sampled if sampled else None


def split_tokens(life: Life, shipped: Shipped | None) -> list[tuple[Place, int]]:
    """Where the tokens of one settled rollout went. They add up to `life.tokens`.

    Of one that was queued, what its samples do not hold is `overlong`; of one that shipped, what the batch masked
    is `stale`.
    """
    fate: Place = life.fate or "failed"
    held = life.tokens if life.ships is None else life.ships
    masked = 0 if fate == "stale" else min(life.masked, held)
    if fate == "shipped" and shipped is not None:
        if life.ships is None:  # nobody told what its samples hold: the batch does
            held = max(shipped.trained, life.tokens - shipped.cut)
        masked = max(0, held - shipped.trained)
    parts: list[tuple[Place, int]] = [(fate, held - masked)]
    if masked:
        parts.append(("stale", masked))
    if held < life.tokens:
        parts.append(("overlong", life.tokens - held))
    return parts


def goodput(lines: list[Line]) -> float | None:
    """Shipped tokens / all tokens sampled for training so far, in flight and queued included.

    None before anything was sampled. Evals are in neither number: they are bought, not wasted.
    """
    train = [line for line in lines if line.split == "train"]
    sampled = sum(line.sampled for line in train)
    return sum(line.tokens["shipped"] for line in train) / sampled if sampled else None


def _places(settled: dict[str, int], unsettled: dict[str, int]) -> dict[Place, int]:
    return {place: settled.get(place, 0) + unsettled.get(place, 0) for place in PLACES}
