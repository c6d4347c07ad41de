"""Rollouts in flight: one permit each, from `StartRollout` to `RolloutEnded`, whatever happens between."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.core.accounting import StreamAccount
from paceline.core.parts import Standing, UnderWay
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import CancelCause
from paceline.domain.task import TaskRef
from paceline.errors import InvariantError


class Flight(msgspec.Struct, eq=False, gc=False):
    """One rollout in flight."""

    id: RolloutId
    task: TaskRef
    engine: EngineId
    started: float
    account: StreamAccount
    waits_since: float
    """When it began to do something else than call an engine: its start, or its last call's end."""
    stood: Standing = msgspec.field(default_factory=Standing)
    sampled: int = 0
    """Tokens sampled so far, as the engine requests reported them."""
    requests: int = 0
    """Engine requests that sampled them, over all lives of the run."""
    oldest: Version | None = None
    """Oldest version behind its tokens, or of its first call while that runs; None before."""
    calling: bool = False
    """Whether an engine request of it is under way."""
    cancelled: CancelCause | None = None
    context: int = 0
    """Tokens of its conversation, as far as is known: its place in the engine's working set."""
    first: int = 0
    """Context of its first turn."""
    known: int = 0
    """Context when its last call ended."""
    turns: int = 0
    """Turns begun; segments of one turn count once."""
    wants: int = 0
    """Tokens that the call it asked for may sample."""
    continues: bool = False
    """Whether its next call goes on with a turn that was cut, and is not a new one."""
    at_gate: bool = False
    """Whether it has asked for a call and waits for the grant."""
    kv_version: Version | None = None
    """Version of its last call, whose KV may be cached; None before. For a controller that learns."""
    cold: bool = False
    """Whether its call is the first under newer weights, and finds nothing of its context in the cache."""
    marks: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
    """A controller's: its engine's sums when the call began, and what it expected of the call."""
    parked: bool = False
    """Whether it was taken off its engine: it waits at the gate until there is room."""
    held: bool = False
    """Whether the scheduling policy keeps it parked, until it releases it."""
    late: bool = False
    """Whether the scheduling policy has put it off beyond a cut-off: it goes on, and is not cut off again."""
    mark: int = 0
    """The scheduling policy's: what it had sampled when its round began."""
    reserved: int = 0
    """The scheduling policy's: KV tokens that it counts on for it."""
    granted_at: float = 0.0
    refused: bool = False
    """Whether its last call found its engine busy, and is made again."""

    def age(self, now: float) -> float:
        """Seconds that it has run, without those that it waited to go on after a restart."""
        return now - self.started - self.stood.seconds

    def __lt__(self, other: Flight) -> bool:
        """Oldest first: by start, ties by id."""
        return (self.started, self.id) < (other.started, other.id)


class _ById(dict[RolloutId, Flight]):
    def __missing__(self, rollout: RolloutId) -> Flight:
        raise InvariantError(f"{rollout} is not in flight: it ended, or was never started")


class Flights:
    """The in-flight ledger, with an index by oldest version so that a sweep touches only what it takes."""

    __slots__ = ("_by_version", "by_id", "evals", "held_trains", "of_env", "trains")

    def __init__(self) -> None:
        self.by_id: dict[RolloutId, Flight] = _ById()
        """For whoever looks one up at every turn, which a method would cost as much as the rest. Changed here alone."""
        self._by_version: dict[Version, dict[RolloutId, Flight]] = {}
        self.evals = 0
        self.trains = 0
        self.held_trains = 0
        """Train flights that the scheduling policy holds."""
        self.of_env: dict[EnvName, int] = {}
        """Training rollouts in flight by environment."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, rollout: RolloutId) -> bool:
        return rollout in self.by_id

    def __getitem__(self, rollout: RolloutId) -> Flight:
        return self.by_id[rollout]

    def all(self) -> list[Flight]:
        """Every flight, oldest first."""
        return list(self.by_id.values())

    @property
    def is_training(self) -> bool:
        """Whether any train rollout is not held by the scheduling policy."""
        return self.trains > self.held_trains

    def trains_now(self) -> list[Flight]:
        """Every train flight, oldest first."""
        return [f for f in self.by_id.values() if f.task.split == "train"]

    def of_group(self, group: GroupId, members: int, attempts: int) -> list[Flight]:
        """The flights of a group, by member."""
        found = self.by_id
        ids = (RolloutId(group, member, attempt) for member in range(members) for attempt in range(attempts))
        return [found[rollout] for rollout in ids if rollout in found]

    def add(self, flight: Flight) -> None:
        if flight.id in self.by_id:
            raise InvariantError(f"{flight.id} is in flight already")
        self.by_id[flight.id] = flight
        if flight.task.split == "eval":
            self.evals += 1
        else:
            self.trains += 1
            env = flight.task.env
            self.of_env[env] = self.of_env.get(env, 0) + 1

    def remove(self, rollout: RolloutId) -> Flight:
        flight = self[rollout]
        del self.by_id[rollout]
        if flight.task.split == "eval":
            self.evals -= 1
        else:
            self.trains -= 1
            self.held_trains -= flight.held
            self.of_env[flight.task.env] -= 1
            self._unindex(flight)
        return flight

    def hold(self, flight: Flight, held: bool) -> None:
        """The scheduling policy keeps it parked from here on, or no more."""
        if held != flight.held:
            flight.held = held
            if flight.task.split == "train":
                self.held_trains += 1 if held else -1

    def sampled_since(self, flight: Flight, version: Version) -> None:
        """Tokens of `flight` date back to `version`; evals never go stale and are not indexed."""
        if flight.task.split == "eval" or flight.oldest == version:
            return
        self._unindex(flight)
        flight.oldest = version
        self._by_version.setdefault(version, {})[flight.id] = flight

    def goes_on_from(self, flight: Flight, tokens: int, oldest: Version | None) -> None:
        """Of what `flight` had sampled in earlier lives, these tokens are left."""
        flight.sampled = tokens
        if oldest is None:
            self._unindex(flight)
            flight.oldest = None
        else:
            self.sampled_since(flight, oldest)

    def plain(self) -> list[list[Any]]:
        """Every flight for a checkpoint, oldest first."""
        return [
            UnderWay(
                f.id,
                f.task,
                f.sampled,
                f.requests,
                f.oldest if f.sampled else None,
                f.started,
                f.stood,
                f.late,
            ).plain()
            for f in self.by_id.values()
        ]

    def older_than(self, version: Version) -> list[Flight]:
        """Flights whose oldest version is below `version`, not yet cancelled; O(what it returns)."""
        found = []
        for v in sorted(v for v in self._by_version if v < version):
            found += [f for f in self._by_version[v].values() if f.cancelled is None]
        return found

    def oldest(self) -> Version | None:
        """Oldest version behind any train flight."""
        return min(self._by_version, default=None)

    def _unindex(self, flight: Flight) -> None:
        if flight.oldest is None:
            return
        peers = self._by_version[flight.oldest]
        del peers[flight.id]
        if not peers:
            del self._by_version[flight.oldest]
