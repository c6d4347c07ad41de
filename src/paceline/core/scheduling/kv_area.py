"""Keep the KV cache full to the end: what may be critical first, else the shortest.

A batch under memory pressure takes (steps · a step by itself) + (area under its KV tokens · reading one), and the steps are
fewest, (area) / (what the caches hold), if the caches are full all the time. Longest-first ends with short rollouts that
cannot fill them, shortest-first with a few long ones. So a rollout is *critical* when what may remain of it is a good part of
what everything together will take; those go first, and what they leave is filled with the shortest. Lengths are learnt
(`lengths`). The lower bound is of `sim/bound.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, ClassVar, Final

from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.lengths import Lengths
from paceline.core.scheduling.line import Name, Rank
from paceline.core.scheduling.ordered import Ordered, Seat
from paceline.domain.ids import EngineId, EnvName
from paceline.domain.rollout import Rollout

_FEW: Final = 0.05
"""Share of rollouts that pass what may remain of one. The last of a batch is seldom one of which much was expected, but one of
many of which less was: by the mean, those gave way to shorter ones until it was too late."""

_LOOK: Final = 4
"""How many of the critical ones, and of the others, are tried before a permit stays free: what comes behind them in line
is not much smaller."""


class KvArea(Ordered):
    """`critical`: share of the time left that must perhaps remain of a rollout for it to go first. `fill`: share of the caches that
    is taken to be full on average."""

    has_rounds = True
    orders: ClassVar[int] = 2
    ahead: ClassVar[float] = 0.5

    def __init__(self, chunk_tokens: int, move_gap: float, critical: float, fill: float) -> None:
        super().__init__(chunk_tokens, move_gap)
        self._critical = critical
        self._fill = fill
        self.lengths = Lengths()
        self.steps_left = 0.0
        """Steps of decoding that everything which waits or runs will take."""
        self._rests: dict[Name, tuple[float, float]] = {}
        """Of each that waits: tokens expected, over all its members, and the area of these behind its prompt."""
        self._to_come = 0.0
        """Sum of the first, for groups: their prompts are as long as first prompts are."""
        self._area = 0.0
        """Sum of the second, and of what runs."""
        self._versions: dict[EnvName, int] = {}
        """Fit of each environment that its places in line go by."""

    # ── who comes first ──

    def remaining(self, group: OpenGroup, have: int) -> float:
        lengths = self.lengths.of(group.task.env)
        if not lengths.knows:
            return 0.0
        return max(0.0, lengths.predict(group.id).expected(have) - have)

    def farthest(self, group: OpenGroup, have: int) -> float:
        """What may remain of a member that has sampled `have`: few sample more tokens yet."""
        lengths = self.lengths.of(group.task.env)
        if not lengths.knows:
            return 0.0
        return lengths.predict(group.id).passed_by(_FEW, have) - have

    def rank(self, group: OpenGroup, flight: Flight | None) -> Rank:
        farthest = self.farthest(group, 0 if flight is None else flight.sampled)
        return (0.0, -farthest) if farthest >= self._least else (1.0, self._needs(group, flight)[1])

    def keys(self, group: OpenGroup, flight: Flight | None, remaining: float) -> tuple[Rank, ...]:
        farthest = self.farthest(group, 0 if flight is None else flight.sampled)
        return (remaining, -farthest), (-farthest, 0.0)

    def candidates(self) -> Iterable[tuple[OpenGroup, Flight | None]]:
        """The first few of those that are critical, the longest first; then of the others, the shortest first."""
        shortest, longest = self._firsts(0, _LOOK), self._firsts(1, _LOOK)
        self.steps_left = self._time_left()
        least = self._least
        for (farthest, _), name in longest:
            if -farthest < least:
                break
            yield self._named(name)
        for (_, farthest), name in shortest:
            if -farthest < least:
                yield self._named(name)

    @property
    def _least(self) -> float:
        """Tokens that must remain of a critical one."""
        return self._critical * self.steps_left or inf

    # ── the time that is left ──

    def _time_left(self) -> float:
        """Area of what waits and runs, over what the caches hold of it in a step."""
        capacity = sum(e.kv_tokens or 0 for e in self.desk.fleet.engines() if e.usable)
        if not capacity:
            return 0.0
        return max(0.0, self._area + self._to_come * self.first_context) / (capacity * self._fill)

    def place(self, group: OpenGroup, flight: Flight | None, remaining: float) -> None:
        super().place(group, flight, remaining)
        if flight is None:
            members = group.unlaunched + len(group.retries)
            self._expect(group.id, members * remaining, members * remaining * remaining / 2)
        else:
            self._expect(flight.id, 0.0, remaining * (flight.context + remaining / 2))

    def leave(self, name: Name, env: EnvName | None) -> None:
        super().leave(name, env)
        self._expect(name, 0.0, 0.0)

    def _expect(self, name: Name, tokens: float, area: float) -> None:
        before, area_before = self._rests.pop(name, (0.0, 0.0))
        if tokens or area:
            self._rests[name] = tokens, area
        self._to_come += tokens - before
        self._area += area - area_before

    # ── what runs ──

    def _sit(self, flight: Flight, engine: EngineId, context: int, remaining: float) -> Seat:
        seat = super()._sit(flight, engine, context, remaining)
        self._area += remaining * (context + remaining / 2)
        return seat

    def _rise(self, flight: Flight) -> Seat | None:
        seat = super()._rise(flight)
        if seat is not None:
            self._area -= seat.remaining * (seat.context + seat.remaining / 2)
        return seat

    # ── what is learnt ──

    def opened(self, group: OpenGroup) -> None:
        super().opened(group)
        self.lengths.of(group.task.env).opened(group.id)

    def turn_asked(self, flight: Flight) -> None:
        lengths = self.lengths.of(flight.task.env)
        group = self.desk.groups.of(flight.id).id
        if flight.sampled and lengths.running(group, flight.id.member, flight.sampled):
            self.stale[group] = None
        super().turn_asked(flight)

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        super().rollout_ended(flight, rollout, group)
        env = rollout.task.env
        lengths = self.lengths.of(env)
        ending, cause = rollout.outcome.ending, rollout.outcome.cause
        if ending in ("completed", "truncated"):
            is_runaway = cause in ("tokens", "context")
            lengths.end(group.id, rollout.id.member, flight.sampled, is_runaway=is_runaway)
        elif ending == "cancelled":
            lengths.cut_off(group.id, rollout.id.member, flight.sampled)
        self.stale[group.id] = None
        if group.id not in self._open:
            lengths.closed(group.id)
        if self._versions.get(env) != lengths.version:
            self._versions[env] = lengths.version
            self.stale.update(dict.fromkeys(n for n, each in self._open.items() if each.task.env == env))

    def batch_cut(self) -> None:
        for env, lengths in self.lengths.envs().items():
            if lengths.ended:
                self.desk.note_lengths(env, lengths)

    def snapshot(self) -> dict[str, Any]:
        return {"policy": "kv_area", "lengths": self.lengths.snapshot(), "first": self._first}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("policy") == "kv_area":
            self.lengths.restore(state["lengths"])
            self._first = state["first"]
