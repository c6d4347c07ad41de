"""The life of every rollout, from its start to its fate: the one place that pieces it together.

        StartRollout        RolloutEnded         GroupProcessed            ShipBatch, NoteStale, FinishRun
    ────────┬───────────────────┬─────────────────────┬──────────────────────────┬──────────
            in flight           its group is open     queued (if it may train)   settled
            ▲ TurnRequested, SegmentEnded             └ else settled at once

The account, the training rows and the length bias watch these changes instead of reading events themselves, so
that they cannot disagree about what became of a rollout. Memory: what has not settled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.domain.batch import Batch
from paceline.domain.commands import (
    FinishRun,
    NoteDiscarded,
    NoteStale,
    SaveCheckpoint,
    ShipBatch,
    SplitGroup,
    StartRollout,
)
from paceline.domain.events import (
    GroupProcessed,
    RolloutContinued,
    RolloutEnded,
    RunOpened,
    SegmentEnded,
    TurnRequested,
)
from paceline.domain.group import Fate, GroupResult, Verdict
from paceline.domain.ids import EnvName, GroupId, RolloutId, Version
from paceline.domain.rollout import Ending, Rollout
from paceline.domain.task import Split
from paceline.observe.fold import Fold, Handler

_FATES: Mapping[str, Fate] = {"stale": "stale", "discarded": "discarded", "deferred": "deferred"}
_REFUSED = re.compile(r"gate ([^:]+): ")
"""What the reason of a discard begins with where a gate gave it: the scheduling policy discards too."""
_SNAPSHOTS = 4  # checkpoints that a resumption may go back to, newest last


class Life:
    """What is known of one rollout so far."""

    __slots__ = (
        "advantage",
        "cached",
        "cause",
        "context",
        "ended",
        "ending",
        "env",
        "env_s",
        "fate",
        "flags",
        "gate_s",
        "group",
        "id",
        "masked",
        "model_s",
        "newest",
        "oldest",
        "prefill",
        "prefix",
        "put_off",
        "recomputed",
        "refused_by",
        "reward",
        "rewards",
        "ships",
        "split",
        "started",
        "tokens",
        "turns",
        "version",
    )

    def __init__(self, at: float, start: StartRollout) -> None:
        self.id: RolloutId = start.rollout
        self.group: GroupId = start.rollout.group
        """The group it is a member of now."""
        self.put_off = start.put_off
        """The `PutOff` that it comes from; 0 for one of a task that was drawn."""
        self.env: EnvName = start.task.env
        self.split: Split = start.task.split
        self.version: Version = start.version
        self.started = at
        self.ended: float | None = None
        self.tokens = 0
        """Sampled so far, by every request that answered."""
        self.ships: int | None = None
        """Those of them that its samples hold, once it is queued; the rest was cut off."""
        self.masked = 0
        """Those of `ships` that no longer train because they are too old."""
        self.turns = 0
        self.context = 0
        """Prompt tokens of the request that was asked for last."""
        self.prefix = 0
        """Context tokens that an engine has already had: prompt and sampled tokens of the last request."""
        self.prefill = 0
        """Prompt tokens that engines computed."""
        self.cached = 0
        """Prompt tokens whose KV an engine still had."""
        self.recomputed = 0
        """Computed prompt tokens that an engine had had before, for this very rollout."""
        self.ending: Ending | None = None
        self.cause: str | None = None
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.model_s = self.gate_s = self.env_s = 0.0
        self.oldest: Version | None = None
        self.newest: Version | None = None
        self.fate: Fate | None = None
        """None until its group was processed; `queued` until it ships or is dropped."""
        self.advantage: float | None = None
        self.flags: tuple[str, ...] = ()
        self.refused_by = ""
        """The gate of its environment that threw its group away."""


class Tally:
    """What engines did for one environment's rollouts of one split, counted request by request."""

    __slots__ = ("cached", "launched", "prefill", "recomputed", "sampled")

    def __init__(self) -> None:
        self.launched = 0
        self.sampled = 0
        self.prefill = 0
        self.cached = 0
        self.recomputed = 0


class Shipped:
    """What a batch takes of one rollout, in tokens of its samples."""

    __slots__ = ("cut", "samples", "trained")

    def __init__(self) -> None:
        self.samples = 0
        self.trained = 0
        self.cut = 0


class LifeWatcher:
    """Is told of changes. Override what matters."""

    def on_start(self, at: float, life: Life) -> None: ...

    def on_lost(self, at: float, life: Life, tokens: int) -> None:
        """It went on after a restart without these tokens, which it had sampled."""

    def on_end(self, at: float, life: Life) -> None:
        """The rollout ended; what it sampled and earned is known, its fate is not."""

    def on_group(self, at: float, env: EnvName, result: GroupResult) -> None:
        """A group was processed; its rollouts' verdicts follow."""

    def on_verdict(self, at: float, life: Life) -> None:
        """Everything but the last word is known: a train rollout counts as finalised here, exactly once."""

    def on_settled(self, at: float, life: Life, shipped: Shipped | None) -> None:
        """`life.fate` is final. `shipped` says how much of a shipped one the batch took."""


class Lives(Fold):
    """Follows every rollout that has not settled."""

    def __init__(self) -> None:
        self.unsettled: dict[RolloutId, Life] = {}
        self.queue: dict[RolloutId, Life] = {}
        """The batch list: those of them that may train, in order."""
        self.tallies: dict[tuple[EnvName, Split], Tally] = {}
        self.in_flight = {"train": 0, "eval": 0}
        self.sampled_tokens = 0
        """Sampled by all engines, train and eval."""
        self.strays = 0
        """Requests that answered for a rollout that is not in flight; their tokens are in no account."""
        self._groups: dict[GroupId, list[Life]] = {}
        self._watchers: tuple[LifeWatcher, ...] = ()
        self._queued_at: dict[int, frozenset[RolloutId]] = {}

    def watch(self, watcher: LifeWatcher) -> None:
        """Tell `watcher` of every change from now on, in order of registration."""
        self._watchers = (*self._watchers, watcher)

    def handlers(self) -> Mapping[type, Handler]:
        return {
            RunOpened: self._opened,
            StartRollout: self._start,
            TurnRequested: self._turn_requested,
            SegmentEnded: self._segment_ended,
            RolloutContinued: self._continued,
            RolloutEnded: self._rollout_ended,
            GroupProcessed: self._group_processed,
            ShipBatch: self._ship,
            NoteStale: self._stale,
            NoteDiscarded: self._discarded,
            SplitGroup: self._split,
            SaveCheckpoint: self._checkpoint,
            FinishRun: self._finish,
        }

    def tally(self, env: EnvName, split: Split) -> Tally:
        key = (env, split)
        if (tally := self.tallies.get(key)) is None:
            tally = self.tallies[key] = Tally()
        return tally

    def _start(self, at: float, start: StartRollout) -> None:
        life = Life(at, start)
        self.unsettled[life.id] = life
        before = (
            self.unsettled.get(life.id._replace(attempt=life.id.attempt - 1)) if life.id.attempt else None
        )
        if before is not None:
            life.group = before.group
        self._groups.setdefault(life.group, []).append(life)
        if before is not None:
            # However it ended: of a group that runs in one call, what ended well is tried again with what did not.
            self._verdict(at, before, "failed")
        self.in_flight[life.split] += 1
        self.tally(life.env, life.split).launched += 1
        for watcher in self._watchers:
            watcher.on_start(at, life)

    def _turn_requested(self, at: float, event: TurnRequested) -> None:
        if (life := self.unsettled.get(event.rollout)) is not None:
            life.context = event.context_tokens

    def _segment_ended(self, at: float, event: SegmentEnded) -> None:
        sampled = 0
        for _, count in event.versions:
            sampled += count
        life = self.unsettled.get(event.rollout)
        if life is None or life.ended is not None:
            self.strays += 1
            return
        computed = max(0, life.context - event.cached_tokens)
        again = max(0, min(life.prefix, life.context) - event.cached_tokens)
        life.turns += 1
        life.tokens += sampled
        life.cached += event.cached_tokens
        life.prefill += computed
        life.recomputed += again
        life.prefix = life.context + sampled
        self.sampled_tokens += sampled
        tally = self.tallies[life.env, life.split]
        tally.sampled += sampled
        tally.cached += event.cached_tokens
        tally.prefill += computed
        tally.recomputed += again

    def _continued(self, at: float, event: RolloutContinued) -> None:
        if (life := self.unsettled.get(event.rollout)) is None or not event.lost:
            return
        life.tokens -= event.lost
        for watcher in self._watchers:
            watcher.on_lost(at, life, event.lost)

    def _rollout_ended(self, at: float, event: RolloutEnded) -> None:
        rollout = event.rollout
        life = self.unsettled.get(rollout.id)
        if life is None or life.ended is not None:
            self.strays += 1
            return
        life.ended = at
        self.in_flight[life.split] -= 1
        recorded = _copy_record(life, rollout)
        tally = self.tallies[life.env, life.split]
        if recorded > life.tokens:  # a shell that reports no turns: the record is all there is
            self.sampled_tokens += recorded - life.tokens
            tally.sampled += recorded - life.tokens
            life.tokens = recorded
        for watcher in self._watchers:
            watcher.on_end(at, life)
        if life.split == "eval":
            self._settle(at, life, "eval")

    def _group_processed(self, at: float, event: GroupProcessed) -> None:
        result = event.result
        mates = self._groups.get(result.group)
        if not mates:
            return
        for watcher in self._watchers:
            watcher.on_group(at, mates[0].env, result)
        for verdict in result.verdicts:
            life = self.unsettled.get(verdict.rollout)
            if life is not None and life.fate is None:
                _copy_verdict(life, verdict)
                self._verdict(at, life, verdict.fate)
        for life in [mate for mate in mates if mate.fate is None and mate.ended is not None]:
            self._verdict(at, life, _fate_of_ending(life))

    def _verdict(self, at: float, life: Life, fate: Fate) -> None:
        life.fate = fate
        for watcher in self._watchers:
            watcher.on_verdict(at, life)
        if fate == "queued":
            self.queue[life.id] = life
        else:
            self._settle(at, life, fate)

    def _settle(self, at: float, life: Life, fate: Fate, shipped: Shipped | None = None) -> None:
        life.fate = fate
        del self.unsettled[life.id]
        self.queue.pop(life.id, None)
        mates = self._groups[life.group]
        mates.remove(life)
        if not mates:
            del self._groups[life.group]
        for watcher in self._watchers:
            watcher.on_settled(at, life, shipped)

    def _ship(self, at: float, command: ShipBatch) -> None:
        taken = taken_of(command.batch)
        for rollout in command.batch.rollouts:
            if (life := self.queue.get(rollout)) is not None:
                self._settle(at, life, "shipped", taken.get(rollout))

    def _stale(self, at: float, command: NoteStale) -> None:
        if (life := self.queue.get(command.rollout)) is None:
            return
        if command.action == "dropped":
            self._settle(at, life, "stale")
        elif command.action == "masked":
            life.masked += command.tokens

    def _discarded(self, at: float, command: NoteDiscarded) -> None:
        if (life := self.queue.get(command.rollout)) is not None:
            if refused := _REFUSED.match(command.reason):
                life.refused_by = refused[1]
            self._settle(at, life, "discarded")

    def _split(self, at: float, command: SplitGroup) -> None:
        for rollout in command.rollouts:
            if (life := self.unsettled.get(rollout)) is None:
                continue
            self._groups[life.group].remove(life)
            life.group = command.rest
            self._groups.setdefault(command.rest, []).append(life)

    def _checkpoint(self, at: float, command: SaveCheckpoint) -> None:
        self._queued_at[command.step] = frozenset(self.queue)
        while len(self._queued_at) > _SNAPSHOTS:
            del self._queued_at[next(iter(self._queued_at))]

    def _opened(self, at: float, event: RunOpened) -> None:
        """Maybe a resumption: what ran died with its process, and of the queue only what the checkpoint held is left.

        A run that died before its first checkpoint begins anew and says so, but its journal goes on. One that was
        recovered from its journal has lost nothing but what was under way, and says so of each.
        """
        if event.recovered:
            return
        step = event.resumed_from
        self._close(at, keep=frozenset() if step is None else self._queued_at.get(step, frozenset()))

    def _finish(self, at: float, command: FinishRun) -> None:
        """What is still queued is left over, unless the run was cut short: then it waits for a resumption, and so does what
        an error left under way."""
        if command.status == "done":
            self._close(at, keep=frozenset())

    def _close(self, at: float, keep: frozenset[RolloutId]) -> None:
        for life in [life for key, life in self.unsettled.items() if key not in keep]:
            if life.ended is None:
                life.ended, life.ending, life.cause = at, "cancelled", "shutdown"
                self.in_flight[life.split] -= 1
                for watcher in self._watchers:
                    watcher.on_end(at, life)
            if life.split == "eval":
                self._settle(at, life, "eval")
            elif life.fate == "queued":
                self._settle(at, life, "left_over")
            else:
                self._verdict(at, life, "failed" if life.ending == "failed" else "cancelled")


def taken_of(batch: Batch) -> dict[RolloutId, Shipped]:
    """Tokens that a batch takes, by rollout; a rollout may have several samples. Empty without samples."""
    taken: dict[RolloutId, Shipped] = {}
    for sample in batch.samples:
        if (entry := taken.get(sample.rollout)) is None:
            entry = taken[sample.rollout] = Shipped()
        entry.samples += 1
        entry.trained += sample.trainable_tokens
        entry.cut += sample.cut_tokens
    return taken


def _copy_record(life: Life, rollout: Rollout) -> int:
    """Take over what the record says; returns the tokens it says were sampled."""
    life.ending = rollout.outcome.ending
    life.cause = rollout.outcome.cause
    life.reward = rollout.reward
    life.rewards = rollout.rewards
    life.model_s = rollout.model_s
    life.gate_s = rollout.gate_s
    life.env_s = rollout.env_s
    # Until now its requests were counted: a turn that was parked, or went on elsewhere, took several.
    life.turns = len(rollout.turns) or life.turns
    tokens = 0
    oldest = newest = None
    for turn in rollout.turns:
        for version, count in turn.versions:
            if count:
                tokens += count
                if oldest is None or version < oldest:
                    oldest = version
                if newest is None or version > newest:
                    newest = version
    life.oldest, life.newest = oldest, newest
    return tokens


def _copy_verdict(life: Life, verdict: Verdict) -> None:
    life.advantage = verdict.advantage
    life.flags = verdict.flags
    if verdict.fate == "queued" and verdict.samples:
        life.ships = min(life.tokens, sum(sample.trainable_tokens for sample in verdict.samples))


def _fate_of_ending(life: Life) -> Fate:
    """The fate of a rollout on which nobody gave a verdict: what its ending says."""
    if life.ending == "cancelled":
        return _FATES.get(life.cause or "", "cancelled")
    return "failed" if life.ending == "failed" else "cancelled"
