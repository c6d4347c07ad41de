"""Which environment next, so that what reaches the trainer has the shares that were asked for.

Shares of draws are not shares of training: groups of one environment fail, carry no signal, or come back late. So the
mix looks at what its groups bring, in rollouts or in tokens:

    y    what a group of the environment brings, on average; recent groups count most
    d    what it has brought lately, forgotten exponentially
    n    its groups under way, each worth y when it comes back: else a slow environment would be drawn again and again
         for what it is about to bring

    need = max(0, share * (sum(d + n*y) + horizon) - d - n*y)        what it is short of, one batch ahead
    draws are shared in proportion to need / y, kept between each environment's floor and ceiling

Feedforward (1/y) puts it right at once, feedback (d) keeps it right. Floors keep an estimate alive for an environment
that brings nothing; ceilings bound what one that brings nothing may cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from paceline.domain.ids import EnvName
from paceline.errors import ConfigError

MixBy: TypeAlias = Literal["draws", "rollouts", "tokens"]

_RECENT = 24.0
"""Groups over which what a group brings is averaged: enough to smooth a coin, few enough to follow a policy."""

_LEAST_YIELD = 0.05
"""Share of a full group that a group is taken to bring at least: what a draw is divided by must not vanish."""

_WINDOW_BATCHES = 16.0
"""Batches after which what was brought is forgotten to 1/e."""

_FLOOR = 0.1
"""Share of its own share that an environment is drawn at least, unless it says otherwise."""


class MixTarget(msgspec.Struct, frozen=True):
    """What one environment should be."""

    env: EnvName
    weight: float
    group_size: int = 1
    floor: float | None = None
    """Least share of draws; None takes a tenth of its share."""
    ceiling: float | None = None
    """Largest share of draws; None goes half way from its share to all."""


class Mix:
    """The shares of draws, from what draws have brought."""

    def __init__(self, targets: Sequence[MixTarget], by: MixBy, batch: float) -> None:
        """`batch`: what one batch holds, in rollouts or tokens. ConfigError for floors and ceilings that cannot be."""
        total = sum(target.weight for target in targets)
        self.by = by
        self._batch = max(1.0, batch)
        self._envs = {target.env: _Env(target, target.weight / total) for target in targets}
        floors = sum(env.floor for env in self._envs.values())
        ceilings = sum(env.ceiling for env in self._envs.values())
        if floors > 1 + 1e-9:
            raise ConfigError(
                f"the environments' floors add up to {floors:g} of all draws: lower them to 1 or less"
            )
        if ceilings < 1 - 1e-9:
            raise ConfigError(
                f"the environments' ceilings add up to {ceilings:g} of all draws: raise them to 1 or more"
            )
        for env in self._envs.values():
            if env.floor > env.ceiling:
                raise ConfigError(
                    f"env {env.name!r}: floor {env.floor:g} > ceiling {env.ceiling:g}: lower floor"
                )

    # ── what happens ──

    def drawn(self, env: EnvName) -> None:
        """A group of it was opened."""
        self._envs[env].under_way += 1

    def returned(self, env: EnvName, rollouts: int, tokens: int) -> None:
        """A group of it was processed, and brought this many rollouts and tokens that may train."""
        state = self._envs.get(env)
        if state is None:
            return
        state.under_way = max(0, state.under_way - 1)
        brought = float(tokens if self.by == "tokens" else rollouts)
        state.groups = min(_RECENT, state.groups + 1.0)
        state.brings += (brought - state.brings) / state.groups
        if brought:
            self._forget(brought)
            state.brought += brought

    def lost(self, env: EnvName, rollouts: int, tokens: int) -> None:
        """Of what it brought, this much did not reach the trainer after all."""
        state = self._envs.get(env)
        if state is not None:
            state.brought = max(0.0, state.brought - float(tokens if self.by == "tokens" else rollouts))

    def under_way(self, env: EnvName) -> int:
        """Groups of it that have been opened and not processed."""
        return self._envs[env].under_way

    # ── what follows ──

    def shares(self, open_to: Sequence[EnvName]) -> list[float]:
        """Shares of the next draw among these environments; they add up to 1."""
        envs = [self._envs[name] for name in open_to]
        if self.by == "draws":
            return _normed([env.share for env in envs])
        typical = self._typical()
        wants = []
        total = self._batch
        for env in self._envs.values():
            total += env.brought + env.under_way * env.expected(typical)
        for env in envs:
            expected = env.expected(typical)
            need = max(0.0, env.share * total - env.brought - env.under_way * expected)
            wants.append(need / expected)
        if not any(wants):
            wants = [env.share for env in envs]
        return _between(
            _normed(wants), [env.floor for env in envs], [max(env.ceiling, env.floor) for env in envs]
        )

    def _typical(self) -> float:
        """What a rollout of a group brings, over all environments: a guess for those that have brought nothing yet."""
        if self.by == "rollouts":
            return 1.0
        known = [env.brings / env.size for env in self._envs.values() if env.groups and env.brings]
        return sum(known) / len(known) if known else 1.0

    def _forget(self, brought: float) -> None:
        keep = 1.0 / (1.0 + brought / (_WINDOW_BATCHES * self._batch))
        for env in self._envs.values():
            env.brought *= keep

    # ── resuming ──

    def snapshot(self) -> dict[str, Any]:
        """What was learnt. Groups under way are counted anew when they are taken up again (`drawn`)."""
        return {
            "by": self.by,
            "envs": {name: [env.groups, env.brings, env.brought] for name, env in self._envs.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a snapshot; one that counted something else says nothing."""
        if state.get("by") != self.by:
            return
        for name, (groups, brings, brought) in state["envs"].items():
            if (env := self._envs.get(name)) is not None:
                env.groups, env.brings, env.brought = groups, brings, brought


class _Env:
    """One environment's state."""

    __slots__ = ("brings", "brought", "ceiling", "floor", "groups", "name", "share", "size", "under_way")

    def __init__(self, target: MixTarget, share: float) -> None:
        self.name = target.env
        self.share = share
        self.size = target.group_size
        self.floor = _FLOOR * share if target.floor is None else target.floor
        self.ceiling = (1.0 + share) / 2 if target.ceiling is None else target.ceiling
        self.under_way = 0
        self.groups = 0.0
        """How many groups the average stands on, at most `_RECENT`."""
        self.brings = 0.0
        self.brought = 0.0

    def expected(self, typical: float) -> float:
        """What a group of it brings: what it did, and before that, all of it."""
        full = self.size * typical
        if not self.groups:
            return full
        # Few groups say little: the guess counts as two of them.
        known = (
            (self.brings * self.groups + full * 2.0) / (self.groups + 2.0) if self.groups < 8 else self.brings
        )
        return max(known, _LEAST_YIELD * full)


def _normed(values: list[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total > 0 else [1.0 / len(values)] * len(values)


def _between(shares: list[float], floors: list[float], ceilings: list[float]) -> list[float]:
    """The shares moved between their bounds, still adding up to 1; what one gives up, the others share in proportion.

    Where not all environments are open, the bounds of those that are may not fit together: they give way then.
    """
    if sum(floors) >= 1 or sum(ceilings) <= 1:
        return _normed(floors if sum(floors) >= 1 else ceilings)
    fixed: dict[int, float] = {}
    for _ in shares:
        rest = [i for i in range(len(shares)) if i not in fixed]
        left = 1.0 - sum(fixed.values())
        weight = sum(shares[i] for i in rest)
        now = {i: left * shares[i] / weight if weight > 0 else left / len(rest) for i in rest}
        low = {i: floors[i] for i in rest if now[i] < floors[i]}
        high = {i: ceilings[i] for i in rest if now[i] > ceilings[i]}
        if not low and not high:
            return [fixed.get(i, now.get(i, 0.0)) for i in range(len(shares))]
        # Only the side that moves more is fixed at once: fixing both could take from one what it gives to the other.
        under = sum(floors[i] - now[i] for i in low)
        over = sum(now[i] - ceilings[i] for i in high)
        fixed.update(low if under >= over else high)
    return _normed([fixed.get(i, shares[i]) for i in range(len(shares))])
