"""Environments that are out: no more of their rollouts are started than it takes to see when they are back.

    closed ──failures in a row, of several groups──▶ open ──pause over──▶ one rollout is let through (the probe)
      ▲                                               ▲                      │
      │                                               └──fails: twice the pause
      └──────────────── any of its rollouts works ───────────────────────────┘

When a sandbox provider or a judge is down, every rollout of its environment fails within seconds, and so does every
further attempt at it: without this, an outage of a minute costs every task that was drawn in it. What counts is the
cause `infrastructure` alone; code that raises is no outage, and is ended by `batch.dead_group_limit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from paceline.core.dead import brief
from paceline.domain.commands import NoteOutage
from paceline.domain.ids import EnvName, GroupId, RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import NoProgressError

FAILURES: Final = 8
"""Rollouts in a row that must fail before an environment counts as out."""
GROUPS: Final = 2
"""Groups that they must be of: what fails in one group alone is its task."""
FIRST_S: Final = 1.0
LONGEST_S: Final = 300.0
"""The first pause before a probe, and the longest; each is twice the one before."""


class _Breaker:
    """One environment's, from its first failure to the next rollout that works."""

    __slots__ = ("count", "groups", "last", "pause_s", "probe", "probe_at", "since")

    def __init__(self) -> None:
        self.count = 0
        self.groups: set[GroupId] = set()
        self.last = ""
        self.since: float | None = None
        """When it opened; None while it is closed."""
        self.pause_s = FIRST_S
        self.probe_at = 0.0
        self.probe: RolloutId | None = None

    @property
    def trips(self) -> bool:
        return self.count >= FAILURES and len(self.groups) >= GROUPS


class Breakers:
    """Those of all training environments. An environment of which nothing fails costs nothing."""

    __slots__ = ("_breakers", "_envs", "_patience_s", "_works")

    def __init__(
        self, envs: Collection[EnvName], patience_s: float, works: Callable[[EnvName], bool]
    ) -> None:
        """`envs`: training environments; `patience_s`: how long all of them together may be out; `works`: whether one has tasks
        to draw, or rollouts under way or to be started. One that has none of these brings nothing, in or out."""
        self._envs = tuple(envs)
        self._works = works
        self._patience_s = patience_s
        self._breakers: dict[EnvName, _Breaker] = {}

    def allows(self, env: EnvName, now: float) -> bool:
        """Whether a rollout of it may start."""
        breaker = self._breakers.get(env)
        if breaker is None or breaker.since is None:
            return True
        return breaker.probe is None and now >= breaker.probe_at

    def next_at(self, env: EnvName) -> float | None:
        """When one may, of an environment that is not allowed now; None when that depends on a probe under way."""
        breaker = self._breakers[env]
        return breaker.probe_at if breaker.probe is None else None

    def started(self, rollout: RolloutId, env: EnvName) -> None:
        """A rollout was started: the probe, where its environment is out."""
        breaker = self._breakers.get(env)
        if breaker is not None and breaker.since is not None:
            breaker.probe = rollout

    def ended(self, rollout: Rollout, now: float) -> NoteOutage | None:
        """Take note of an ending. Returns what to tell when the environment goes out, or comes back.

        NoProgressError when all environments have been out for longer than the run is willing to wait.
        """
        env, outcome = rollout.task.env, rollout.outcome
        if outcome.ending == "failed" and outcome.cause == "infrastructure":
            return self._failed(rollout, env, now)
        breaker = self._breakers.get(env)
        if breaker is None:
            return None
        if outcome.ending == "cancelled" or outcome.cause == "engine":  # that says nothing of the environment
            if breaker.probe == rollout.id:
                breaker.probe = None
            return None
        del self._breakers[env]
        if breaker.since is None:
            return None
        return NoteOutage(env, False, f"env {env!r} is back after {now - breaker.since:.0f} s")

    def _failed(self, rollout: Rollout, env: EnvName, now: float) -> NoteOutage | None:
        breaker = self._breakers.get(env)
        if breaker is None:
            breaker = self._breakers[env] = _Breaker()
        breaker.count += 1
        if len(breaker.groups) < GROUPS:
            breaker.groups.add(rollout.id.group)
        breaker.last = brief(rollout.outcome.detail)
        if breaker.since is None:
            if not breaker.trips:
                return None
            breaker.since = now
        elif breaker.probe == rollout.id:
            breaker.probe = None
            breaker.pause_s = min(LONGEST_S, 2.0 * breaker.pause_s)
            self._lose_patience(now)
        else:
            return None  # started before it was known to be out
        breaker.probe_at = now + breaker.pause_s
        return NoteOutage(
            env,
            True,
            f"env {env!r} is out: {breaker.count} rollouts in a row failed, last: {breaker.last}; the next is tried "
            f"in {breaker.pause_s:g} s",
        )

    def _lose_patience(self, now: float) -> None:
        opened = {env: b.since for env, b in self._breakers.items() if b.since is not None}
        if any(env not in opened and self._works(env) for env in self._envs):
            return
        since = max(opened.values())
        if now - since < self._patience_s:
            return
        told = "; ".join(f"env {env!r}: {breaker.last}" for env, breaker in self._breakers.items())
        raise NoProgressError(
            f"no training environment has worked for {now - since:.0f} s, longer than run.outage_s "
            f"{self._patience_s:g}: {told}"
        )
