"""Length bias: what was trained on against what was drawn.

A scheduler that favours the quick, or drops the slow as stale, trains on shorter behaviour than the policy shows;
rewards look healthy meanwhile. Lengths are sampled tokens. *Drawn* is every train rollout that ended, each with
what it had sampled by then (one cut off early counts as short as it was cut); *trained* is every shipped one.
"""

from __future__ import annotations

import msgspec

from paceline.domain.ids import EnvName
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
    trained: int
    drawn_mean: float | None
    trained_mean: float | None
    buckets: tuple[Bucket, ...]

    @property
    def ratio(self) -> float | None:
        """Mean length trained / mean length drawn; 1 is unbiased, below 1 favours the short."""
        return (
            self.trained_mean / self.drawn_mean if self.trained_mean is not None and self.drawn_mean else None
        )


class _Env:
    __slots__ = ("buckets", "drawn", "drawn_tokens", "trained", "trained_tokens")

    def __init__(self) -> None:
        self.drawn = self.drawn_tokens = self.trained = self.trained_tokens = 0
        self.buckets: dict[int, dict[str, int]] = {}
        """Bits of the length -> fate -> rollouts; the empty fate counts the drawn."""


class Lengths(LifeWatcher):
    """Counts lengths, drawn and trained, per environment and by powers of two."""

    def __init__(self, lives: Lives) -> None:
        self._envs: dict[EnvName, _Env] = {}
        lives.watch(self)

    def on_end(self, at: float, life: Life) -> None:
        if life.split == "train":
            env = self._envs.setdefault(life.env, _Env())
            env.drawn += 1
            env.drawn_tokens += life.tokens
            self._count(env, life.tokens, "")

    def on_settled(self, at: float, life: Life, shipped: Shipped | None) -> None:
        if life.split == "train":
            env = self._envs.setdefault(life.env, _Env())
            self._count(env, life.tokens, life.fate or "failed")
            if life.fate == "shipped":
                env.trained += 1
                env.trained_tokens += life.tokens

    @staticmethod
    def _count(env: _Env, tokens: int, fate: str) -> None:
        bucket = env.buckets.setdefault(max(0, tokens - 1).bit_length() if tokens else 0, {})
        bucket[fate] = bucket.get(fate, 0) + 1

    def bias(self) -> list[LengthBias]:
        """One entry an environment, in order of name."""
        return [
            LengthBias(
                env=name,
                drawn=env.drawn,
                trained=env.trained,
                drawn_mean=env.drawn_tokens / env.drawn if env.drawn else None,
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
            )
            for name, env in sorted(self._envs.items())
        ]
