"""Length bias: what was trained on against what was drawn.

A scheduler that favours the quick, or drops the slow as stale, trains on shorter behaviour than the policy shows;
rewards look healthy meanwhile. Lengths are sampled tokens. *Trained* is every rollout that shipped. *Drawn* is every
response that the policy began: one that was cut off (cancelled, failed, thrown away) is known to be longer than what it
had, and counts so, by Kaplan and Meier's estimate (J. Am. Stat. Assoc. 53, 1958). Counting it as short as it was cut
would hide the very bias that is looked for. One that was put off and sampled again is one response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from paceline.domain.commands import PutOff
from paceline.domain.ids import EnvName, RolloutId
from paceline.observe.fold import Fold, Handler
from paceline.observe.lives import Life, LifeWatcher, Lives, Shipped


class Bucket(msgspec.Struct, frozen=True):
    """Rollouts of at most `upto` tokens, and more than half as many."""

    upto: int
    drawn: int
    trained: int
    by_fate: dict[str, int]
    """All settled ones: staleness against long rollouts shows here."""


class LengthBias(msgspec.Struct, frozen=True):
    """One environment."""

    env: EnvName
    drawn: int
    """Responses begun and ended; one that was put off and came back is one."""
    trained: int
    drawn_mean: float | None
    """With what was cut off counted as longer than it was."""
    trained_mean: float | None
    buckets: tuple[Bucket, ...]
    cut_off: int = 0
    """Those of the drawn whose whole length is not known."""

    @property
    def ratio(self) -> float | None:
        """Mean length trained / mean length drawn; 1 is unbiased, below 1 favours the short."""
        return (
            self.trained_mean / self.drawn_mean if self.trained_mean is not None and self.drawn_mean else None
        )


class _Env:
    __slots__ = ("buckets", "cut_off", "ended", "trained", "trained_tokens")

    def __init__(self) -> None:
        self.trained = self.trained_tokens = 0
        self.ended: Counter[int] = Counter()
        """Length -> responses that ended by themselves there."""
        self.cut_off: Counter[int] = Counter()
        """Length -> responses that were cut off there."""
        self.buckets: dict[int, dict[str, int]] = {}
        """Bits of the length -> fate -> rollouts; the empty fate counts the drawn."""


class Lengths(Fold, LifeWatcher):
    """Counts lengths, drawn and trained, per environment and by powers of two. Memory: the distinct lengths."""

    def __init__(self, lives: Lives) -> None:
        self._envs: dict[EnvName, _Env] = {}
        self._put_off: dict[int, tuple[RolloutId, ...]] = {}
        """`PutOff` -> the rollouts that its members sample again."""
        self._deferred: dict[RolloutId, int] = {}
        """Put off, and not ended again -> tokens that it had."""
        lives.watch(self)

    def handlers(self) -> Mapping[type, Handler]:
        return {PutOff: self._kept}

    def _kept(self, at: float, command: PutOff) -> None:
        if command.again:
            self._put_off[command.number] = command.again

    def on_end(self, at: float, life: Life) -> None:
        if life.split != "train":
            return
        env = self._envs.setdefault(life.env, _Env())
        self._count(env, life.tokens, "")
        again = self._put_off.get(life.put_off) if life.put_off else None
        if again is not None and (had := self._deferred.pop(again[life.id.member], None)) is not None:
            env.cut_off[had] -= 1
            if not env.cut_off[had]:
                del env.cut_off[had]
            if not any(rollout in self._deferred for rollout in again):
                del self._put_off[life.put_off]
        if life.ending in ("completed", "truncated"):
            env.ended[life.tokens] += 1
        else:
            env.cut_off[life.tokens] += 1

    def on_settled(self, at: float, life: Life, shipped: Shipped | None) -> None:
        if life.split != "train":
            return
        env = self._envs.setdefault(life.env, _Env())
        self._count(env, life.tokens, life.fate or "failed")
        if life.fate == "shipped":
            env.trained += 1
            env.trained_tokens += life.tokens
        elif life.fate == "deferred":
            self._deferred[life.id] = life.tokens
            if life.ending != "cancelled":
                # It finished, and is put off with its group: it counts when it comes back.
                env.ended[life.tokens] -= 1
                if not env.ended[life.tokens]:
                    del env.ended[life.tokens]
                env.cut_off[life.tokens] += 1

    @staticmethod
    def _count(env: _Env, tokens: int, fate: str) -> None:
        bucket = env.buckets.setdefault(max(0, tokens - 1).bit_length() if tokens else 0, {})
        bucket[fate] = bucket.get(fate, 0) + 1

    def bias(self) -> list[LengthBias]:
        """One entry an environment, in order of name."""
        return [
            LengthBias(
                env=name,
                drawn=env.ended.total() + env.cut_off.total(),
                trained=env.trained,
                drawn_mean=mean_length(env.ended, env.cut_off),
                trained_mean=env.trained_tokens / env.trained if env.trained else None,
                buckets=tuple(
                    Bucket(
                        upto=1 << bits,
                        drawn=counts.get("", 0),
                        trained=counts.get("shipped", 0),
                        by_fate={fate: count for fate, count in counts.items() if fate},
                    )
                    for bits, counts in sorted(env.buckets.items())
                ),
                cut_off=env.cut_off.total(),
            )
            for name, env in sorted(self._envs.items())
        ]


def mean_length(ended: Mapping[int, int], cut_off: Mapping[int, int]) -> float | None:
    """Mean of lengths of which some are only known to be larger than what is given: the area under Kaplan and Meier's
    curve, which is taken to fall to zero at the largest length seen. None when nothing was seen."""
    at_risk = sum(ended.values()) + sum(cut_off.values())
    if not at_risk:
        return None
    area, left, before = 0.0, 1.0, 0
    for length in sorted({*ended, *cut_off}):
        area += left * (length - before)
        before = length
        if gone := ended.get(length, 0):
            left *= 1.0 - gone / at_risk
        at_risk -= gone + cut_off.get(length, 0)
    return area
