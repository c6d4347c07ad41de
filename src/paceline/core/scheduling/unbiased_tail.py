"""A cut-off chosen beforehand; each response beyond it is put off by itself, and comes back as the same response.

`docs/scheduling.md` proves that what is trained on is then distributed as if nothing had been cut. Who comes back how:

    pinned   cancelled (`deferred`) ─▶ PutOff: its noise, its siblings' rewards ─▶ a group of its own, later, on-policy
    resume   held at the gate ─▶ SplitGroup: its siblings close without it ─▶ released later, with the tokens it has
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final, Literal

from paceline.core.flights import Flight
from paceline.core.groups import OpenGroup
from paceline.core.scheduling.base import Rounds
from paceline.core.scheduling.lengths import ENOUGH, Lengths
from paceline.domain.commands import PutOff
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName, GroupId, Version
from paceline.domain.rollout import Rollout

_SHARES: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99)
"""Shares on time that cut-offs are tried at, where it is learnt."""


_MEMORY: Final = 1000.0
"""Rollouts over which the mean reward is taken."""

_LATEST: Final = 2048
"""Rollouts by which the share beyond a cut-off is reckoned."""

_SPREADS: Final = 2.0
"""Standard deviations of what is put off that a round starts beyond its mean: one round in forty needs a second wave."""


def _alone(group: OpenGroup) -> tuple[float, ...]:
    """What rollouts of a group are compared with of which no other was on time."""
    return () if group.fallback is None else (group.fallback,)


class UnbiasedTail(Rounds):
    """On-policy rounds that end at the cut-off; a round for the late ones when they fill a batch."""

    cuts_whole = True
    hears_turns = True
    hears_endings = True

    def __init__(self, cutoff_tokens: int | None, late: Literal["pinned", "resume"]) -> None:
        super().__init__()
        self._given = cutoff_tokens
        self._is_pinned = late == "pinned"
        self.lengths = Lengths()
        self.cutoffs: dict[EnvName, int | None] = {}
        """Of this round, by environment; None: nothing is cut off."""
        self.is_late = False
        """Whether this round is for those that were put off."""
        self._limit = 0
        """Rollouts that this round starts: a batch, and what will probably be put off."""
        self._gone = 0
        """Put off in this round."""
        self._rewards: dict[EnvName, tuple[float, float]] = {}
        """Mean reward of the latest rollouts, and how many they are."""
        self._latest: dict[EnvName, deque[float]] = {}
        """Tokens of the latest rollouts; of those that were put off, endless."""
        self._late: dict[GroupId, OpenGroup] = {}
        """`resume`: open groups of which members are held."""

    # ── rounds ──

    @property
    def most(self) -> int:
        return max(self._limit, self.batch)

    @property
    def is_quiet(self) -> bool:
        desk = self.desk
        return not desk.flights.is_training and not desk.processing and not desk.owing

    def may_cut(self, step: int, held: Version) -> bool:
        return super().may_cut(step, held) and self.is_quiet

    def places(self) -> int:
        if not self.is_open:
            return 0
        taken = self.desk.pacing.taken
        if not self.is_late:
            return self._limit - self._gone - taken
        if self.desk.kept:
            # All of them come back, so that the batches since the last such round are, together, as if nothing was cut.
            return sum([kept.size for kept in self.desk.kept.values()])
        return self.batch - taken

    def open_round(self) -> None:
        desk = self.desk
        for env, lengths in self.lengths.envs().items():
            if lengths.ended:
                desk.note_lengths(env, lengths)
        waiting = self._waiting
        self._gone = 0
        self.cutoffs = {spec.name: self._cutoff(spec.name) for spec in desk.setup.train}
        if waiting >= self.batch or (waiting > 0 and desk.out_of_tasks):
            self._begin_late()
        else:
            self.is_late = False
            self._limit = self._to_start(self.batch)

    def next_put_off(self) -> PutOff | None:
        if self.is_late or self.desk.out_of_tasks:
            return next(iter(self.desk.kept.values()))
        return None

    def advance(self) -> None:
        super().advance()
        desk = self.desk
        if not self.is_open or self.is_late or not self.is_quiet or desk.list.ready():
            return
        if self.places() > 0 and not desk.out_of_tasks:
            return
        # Everything has stopped, and the batch is not full. Late ones fill it if nothing fresh is left, if most of what is
        # fresh is put off, or if the places of a batch that is sized in tokens were too few of them.
        taken, waiting = desk.pacing.taken, self._waiting
        most_are_late = waiting >= self.batch and 2 * taken < self.batch
        if waiting and (desk.out_of_tasks or taken >= self.batch or most_are_late):
            self._begin_late()
        else:
            self._limit = self._gone + taken + self._to_start(max(1, self.batch - taken))

    def _begin_late(self) -> None:
        """From now on nothing is cut off in this round, nor what fills it up."""
        self.is_late = True
        self._limit = self.desk.pacing.taken + self._waiting
        self._let_go_on()

    def _to_start(self, on_time: int) -> int:
        """Fresh rollouts to start for that many on time.

        What will be put off comes on top, and twice as much as that may vary by, for a further wave takes as long as the
        round: a few more than a batch are on time then, and train. Siblings are late together, which counts as fewer.
        """
        share = self._share_late()
        more = on_time * share / (1 - share)
        alike = max([self._likeness(spec.name) * (spec.group_size - 1) for spec in self.desk.setup.train])
        return on_time + math.ceil(more + _SPREADS * math.sqrt(more * (1 + alike)))

    def _likeness(self, env: EnvName) -> float:
        """Share of the variance of log lengths that siblings have in common; 0 when it is not known."""
        lengths = self.lengths.of(env)
        return lengths.between / (lengths.between + lengths.within) if lengths.knows else 0.0

    # ── the cut-off ──

    def _cutoff(self, env: EnvName) -> int | None:
        """The one given, or the one at which a sample costs least time.

        With a share p late, the rounds on time last as long as the cut-off, and a round of late ones as long as the
        longest of a batch: in steps of decoding, (1 - p)·cutoff + p·longest a batch.
        """
        if self._given is not None:
            return self._given
        lengths = self.lengths.of(env)
        if not lengths.knows:
            return None
        predicted = lengths.predict()
        best, least = None, math.inf
        for share in _SHARES:
            cutoff = predicted.quantile(share)
            late = predicted.beyond(cutoff)
            longest = predicted.quantile(1 - late / (2 * self.batch))
            cost = (1 - late) * cutoff + late * longest
            if cost < least:
                best, least = math.ceil(cutoff), cost
        return best

    def _share_late(self) -> float:
        """Share of the rollouts of a round that will be put off, as far as is known; at most a half."""
        total = late = 0.0
        for spec in self.desk.setup.train:
            cutoff = self.cutoffs[spec.name]
            total += spec.source.weight
            if cutoff is not None:
                late += spec.source.weight * self._beyond(spec.name, cutoff)
        return min(0.5, late / total)

    def _beyond(self, env: EnvName, cutoff: int) -> float:
        """P(length > cut-off): as was seen, or before enough was seen, as a resumed run has learnt it."""
        latest = self._latest.get(env, ())
        if len(latest) >= ENOUGH:
            return sum([tokens > cutoff for tokens in latest]) / len(latest)
        lengths = self.lengths.of(env)
        return lengths.predict().beyond(cutoff) if lengths.knows else 0.0

    def _saw(self, env: EnvName, tokens: float) -> None:
        self._latest.setdefault(env, deque(maxlen=_LATEST)).append(tokens)

    def _cutoff_of(self, flight: Flight) -> int | None:
        """Its cut-off; none in a round of the late, and for one that has been put off before, or whose failed attempt was."""
        if self.is_late or flight.late:
            return None
        group = self.desk.groups.of(flight.id)
        if group.put_off is not None or group.references:
            return None
        return self.cutoffs.get(flight.task.env)

    def budget(self, flight: Flight) -> int | None:
        limit, cutoff = self.desk.setup.segment_tokens, self._cutoff_of(flight)
        if cutoff is None:
            return limit
        left = max(1, cutoff - flight.sampled)
        return left if limit is None else min(left, limit)

    def opened(self, group: OpenGroup) -> None:
        # Known before any member draws its noise, so that it is independent of them: one of an earlier life keeps its own.
        if group.fallback is None:
            group.fallback = self._rewards.get(group.task.env, (0.0, 0.0))[0]

    def turn_asked(self, flight: Flight) -> None:
        if flight.late and not self.is_late:
            # Late ones run in rounds for them alone: an earlier life of the run held it, and it has come to its gate again.
            self._hold(flight, "it was late when the run ended, and goes on in a later round")
            return
        cutoff = self._cutoff_of(flight)
        if cutoff is None or flight.sampled < cutoff:
            return
        self.lengths.of(flight.task.env).cut_off(flight.id.group, flight.id.member, flight.sampled)
        self._saw(flight.task.env, math.inf)
        self._gone += 1
        why = f"it has sampled {flight.sampled} tokens, and the cut-off of this round is {cutoff}"
        if self._is_pinned:
            self.desk.cancel(flight, "deferred", why)
            return
        self.desk.note_late(flight, why)
        self._hold(flight, why)

    def _hold(self, flight: Flight, why: str) -> None:
        group = self.desk.groups.of(flight.id)
        self.desk.give_place(group)
        self.desk.hold(flight, why)
        self._late[group.id] = group
        self._close_on_time(group)

    # ── endings ──

    def rollout_ended(self, flight: Flight, rollout: Rollout, group: OpenGroup) -> None:
        if rollout.outcome.ending in ("completed", "truncated"):
            group_id, member = rollout.id.group, rollout.id.member
            returns = group.put_off is not None or flight.late
            if group.put_off is not None and group.put_off.again:
                group_id, member, _ = group.put_off.again[member]
            is_runaway = rollout.outcome.cause in ("tokens", "context")
            lengths = self.lengths.of(rollout.task.env)
            lengths.end(group_id, member, flight.sampled, is_runaway=is_runaway, returns=returns)
            if not returns:
                self._saw(rollout.task.env, flight.sampled)
            if rollout.reward is not None and math.isfinite(rollout.reward):
                mean, seen = self._rewards.get(rollout.task.env, (0.0, 0.0))
                seen = min(seen + 1, _MEMORY)
                self._rewards[rollout.task.env] = (mean + (rollout.reward - mean) / seen, seen)
        if flight.held:
            self.desk.take_place(group)  # it was stopped, and is a member of its group again
        if group.id not in self.desk.groups:
            self._late.pop(group.id, None)
        elif group.id in self._late:
            self._close_on_time(group)

    def group_processed(self, group: OpenGroup, result: GroupResult) -> None:
        if group.rest is not None and group.rest in self.desk.groups:
            votes = {v.rollout for v in result.verdicts if v.advantage is not None}
            on_time = [float(r.reward) for r in group.arrived if r.id in votes and r.reward is not None]
            why = "they were on time" if on_time else "nobody who was on time may vote"
            self.desk.compare(self.desk.groups[group.rest], tuple(on_time) or _alone(group), why)
        late = tuple([v.rollout for v in result.verdicts if v.fate == "deferred"])
        if late:
            self.desk.put_off(
                group.task,
                len(late),
                f"{len(late)} of {group.size} were beyond the cut-off",
                group_seed=group.seed,
                noise=tuple([self.desk.noise_of(rollout, group) for rollout in late]),
                again=late,
                references=result.references or _alone(group),
            )

    # ── resume: what is held ──

    @property
    def _waiting(self) -> int:
        """Rollouts that were put off and have not come back."""
        held = self.desk.flights.held_trains if self._late else 0
        return held + sum(kept.size for kept in self.desk.kept.values())

    def _members(self, group: OpenGroup) -> list[Flight]:
        """Those that were started for it and have not left it."""
        desk = self.desk
        return [flight for flight in desk.flights_of(group) if desk.groups.of(flight.id) is group]

    def _close_on_time(self, group: OpenGroup) -> None:
        """Let the members close that finished by the cut-off, once none of them is left to come."""
        if group.owes_launches or group.references:
            return
        # What has left it says what it is compared with when the verdicts of its old group are in.
        members = self._members(group)
        if not members or not all(flight.held for flight in members):
            return
        if not group.arrived:
            self.desk.compare(group, _alone(group), "all of them are late: nobody is on time")
        else:
            self._late.pop(group.id)
            rest = self.desk.split(
                group, members, "they go on in a later round; their siblings close without them"
            )
            self._late[rest.id] = rest

    def _let_go_on(self) -> None:
        for flight in self.desk.flights.trains_now():
            if flight.held:
                self.desk.take_place(self.desk.groups.of(flight.id))
                self.desk.release(flight)

    # ── resuming a run ──

    def snapshot(self) -> dict[str, Any]:
        rewards = {env: list(each) for env, each in self._rewards.items()}
        return {"policy": "unbiased_tail", "lengths": self.lengths.snapshot(), "rewards": rewards}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("policy") == "unbiased_tail":
            self.lengths.restore(state["lengths"])
            self._rewards = {env: (mean, seen) for env, (mean, seen) in state["rewards"].items()}
