"""The batch list: what may train, in the order its groups closed, and the cut of a batch from its front.

A sweep comes before every look at readiness, so that a batch is never judged full by rollouts that will not ship.
Post-filters ran before, so the batch size asked for is the batch size shipped. Surplus stays and is first next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from paceline.core.dead import Deaths
from paceline.core.plain import from_plain, to_plain
from paceline.core.staleness import oldest_allowed, staleness, trained_by
from paceline.domain.batch import Batch
from paceline.domain.commands import NoteDead
from paceline.domain.group import GroupResult, Verdict
from paceline.domain.ids import EnvName, RolloutId, Version, parse_rollout_id
from paceline.domain.sample import Sample
from paceline.errors import InvariantError, NoProgressError

OnStale: TypeAlias = Literal["drop", "train", "mask_tokens"]
StaleAction: TypeAlias = Literal["dropped", "trained", "masked"]


class Queued(msgspec.Struct, frozen=True, gc=False):
    """A rollout that waits for its batch."""

    rollout: RolloutId
    env: EnvName
    samples: tuple[Sample, ...]
    tokens: int
    """Every token of every sample: what the rollout adds to a token-sized batch."""
    oldest_version: Version


class Stale(msgspec.Struct, frozen=True, gc=False):
    """A rollout in the list that a sweep found staler than the bound, and what was done about it."""

    rollout: RolloutId
    env: EnvName
    action: StaleAction
    tokens: int
    """Trainable tokens that were dropped or masked, or that train all the same."""
    staleness: int
    reason: str


class BatchList:
    """First in, first out. Holds live rollouts only; give it one of `rollouts` and `tokens`, the batch's size."""

    def __init__(self, *, rollouts: int | None = None, tokens: int | None = None) -> None:
        if (rollouts is None) == (tokens is None):
            raise InvariantError(f"a batch is cut by rollouts {rollouts} or by tokens {tokens}: give one")
        self._target_rollouts = rollouts
        self._target_tokens = tokens
        # A dict keeps the order of insertion, forgets in O(1), and keeps a place when its value is replaced.
        self._live: dict[RolloutId, Queued] = {}
        self._by_version: dict[Version, dict[RolloutId, None]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        """Rollouts that wait."""
        return len(self._live)

    @property
    def tokens(self) -> int:
        """Tokens that wait, counting every token of every sample."""
        return self._tokens

    def add(self, verdict: Verdict, env: EnvName) -> Queued:
        """Queue a rollout whose verdict is `queued`."""
        if verdict.fate != "queued" or not verdict.samples:
            raise InvariantError(
                f"{verdict.rollout} has fate {verdict.fate!r} and {len(verdict.samples)} samples"
            )
        if verdict.rollout in self._live:
            raise InvariantError(f"{verdict.rollout} is in the batch list already")
        entry = _queued(verdict.rollout, env, verdict.samples)
        self._put(entry)
        return entry

    def sweep(self, step: int, bound: int, on_stale: Mapping[EnvName, OnStale]) -> list[Stale]:
        """Apply each environment's rule to what would be staler than `bound` when `step` trains; oldest first.

        Costs as much as what it finds. What `train` keeps is found once.
        """
        oldest = oldest_allowed(step, bound)
        found: list[Stale] = []
        for version in sorted([v for v in self._by_version if v < oldest]):
            for rollout in self._by_version.pop(version):
                entry = self._live[rollout]
                rule = on_stale.get(entry.env, "drop")
                if rule == "train":
                    found.append(_stale(entry, "trained", _trainable(entry), step, bound))
                    continue
                fresh = _masked(entry, oldest) if rule == "mask_tokens" else None
                self._tokens -= entry.tokens
                if fresh is None:
                    del self._live[rollout]
                    found.append(_stale(entry, "dropped", _trainable(entry), step, bound))
                else:
                    self._put(fresh)  # takes the old one's place in the order
                    found.append(_stale(entry, "masked", _trainable(entry) - _trainable(fresh), step, bound))
        return found

    def ready(self) -> bool:
        """Whether a full batch waits. Sweep first."""
        if self._target_rollouts is not None:
            return len(self._live) >= self._target_rollouts
        return self._target_tokens is not None and self._tokens >= self._target_tokens

    def waiting(self) -> list[RolloutId]:
        """The rollouts that wait, in order."""
        return list(self._live)

    def discard(self, rollout: RolloutId) -> Queued:
        """Take one rollout out: it will not train."""
        entry = self._live.pop(rollout)
        self._tokens -= entry.tokens
        self._unindex(entry)
        return entry

    def cut(self, step: int, *, short: bool = False, whole: bool = False, bound: int | None = None) -> Batch:
        """Take the batch of `step` from the front; with `short`, whatever waits if that is less, with `whole` all of it
        though it is more.

        Cut by tokens, a batch ends with the rollout that reaches the target. InvariantError when nothing can be cut, or
        when something waits that a sweep for this step and `bound` would have found.
        """
        if bound is not None:
            oldest, allowed = min(self._by_version, default=step), oldest_allowed(step, bound)
            if oldest < allowed:
                raise InvariantError(f"step {step} takes v{allowed} or newer, but the list holds v{oldest}")
        if not self.ready() and not (short and self._live):
            raise InvariantError(f"step {step}: {len(self)} rollouts ({self._tokens} tokens) are no batch")
        if whole:
            taken = list(self._live.values())
        elif self._target_rollouts is not None:
            taken = list(islice(self._live.values(), self._target_rollouts))
        else:
            taken, tokens = [], 0
            for entry in self._live.values():
                taken.append(entry)
                tokens += entry.tokens
                if self._target_tokens is not None and tokens >= self._target_tokens:
                    break
        for entry in taken:
            del self._live[entry.rollout]
            self._tokens -= entry.tokens
            self._unindex(entry)
        newest = max([version for entry in taken for s in entry.samples for version, _ in s.versions])
        if newest > trained_by(step):
            raise InvariantError(f"step {step} trains v{trained_by(step)}, but holds tokens of v{newest}")
        return Batch(
            step=step,
            samples=tuple([sample for entry in taken for sample in entry.samples]),
            rollouts=tuple([entry.rollout for entry in taken]),
        )

    def clear(self) -> tuple[Queued, ...]:
        """Take everything out: what is left over when a run ends."""
        left = tuple(self._live.values())
        self._live, self._by_version, self._tokens = {}, {}, 0
        return left

    def snapshot(self) -> list[dict[str, Any]]:
        """Everything that waits, in order, as plain data that msgpack can write."""
        return [
            {
                "rollout": str(entry.rollout),
                "env": entry.env,
                "swept": entry.rollout not in self._by_version.get(entry.oldest_version, {}),
                "samples": [to_plain(sample) for sample in entry.samples],
            }
            for entry in self._live.values()
        ]

    def restore(self, data: list[dict[str, Any]]) -> None:
        """Put back what `snapshot` gave, into an empty list."""
        if self._live:
            raise InvariantError(
                f"{len(self)} rollouts wait already: only an empty batch list can be restored"
            )
        for row in data:
            rollout = parse_rollout_id(row["rollout"])
            samples = tuple(from_plain(rollout, row["env"], sample) for sample in row["samples"])
            self._put(_queued(rollout, row["env"], samples), indexed=not row["swept"])

    def _unindex(self, entry: Queued) -> None:
        indexed = self._by_version.get(entry.oldest_version, {})
        indexed.pop(entry.rollout, None)
        if not indexed:
            self._by_version.pop(entry.oldest_version, None)

    def _put(self, entry: Queued, *, indexed: bool = True) -> None:
        self._live[entry.rollout] = entry
        self._tokens += entry.tokens
        if indexed:
            self._by_version.setdefault(entry.oldest_version, {})[entry.rollout] = None


_WARN_AT = 32
"""Dead groups in a row after which people are told, unless the limit is so low that it has to be sooner."""

_NOT_OVER = frozenset({"deferred", "discarded"})
"""Groups that bring nothing because the scheduling policy wants it so: they say nothing about the run."""


class DeadStreak:
    """Counts groups in a row that brought nothing to train, and ends the run when they pass the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kinds: Counter[str] = Counter()
        self._first = max(2, min(_WARN_AT, limit // 8))
        self._warn_at = self._first
        self._deaths = Deaths(self._first)
        self._last_error = ""

    @property
    def length(self) -> int:
        return self._kinds.total()

    def add(self, result: GroupResult, env: EnvName, error: str | None = None) -> NoteDead | None:
        """Take note of a group; returns a warning when it is time for one, long before the limit and again whenever
        there are twice as many, or that it is over. NoProgressError, with the counts, when there were more than the
        limit in a row.

        `error` is that of `GroupProcessed`, when processing itself failed.
        """
        if result.dead in _NOT_OVER:
            return None
        if result.dead is None:
            self._kinds.clear()
            self._last_error = ""
            self._warn_at = self._first
            return NoteDead(env, 0, "a group of it trains again") if self._deaths.end(env) else None
        self._kinds[result.dead] += 1
        warning = self._deaths.add(env, result, error)
        failures = [v.reason for v in result.verdicts if v.fate == "failed" and v.reason]
        self._last_error = error or (failures[-1] if failures else self._last_error)
        if self.length > self._limit:
            counts = ", ".join(f"{kind} {count}" for kind, count in self._kinds.most_common())
            last = f"; the last error was: {self._last_error}" if self._last_error else ""
            raise NoProgressError(
                f"{self.length} groups in a row brought nothing to train, more than batch.dead_group_limit "
                f"{self._limit}: {counts}{last}; {self._deaths.told()}"
            )
        if self.length >= self._warn_at:
            self._warn_at = 2 * self.length
            warning = (
                f"{self.length} groups in a row brought nothing to train; the run ends after {self._limit} "
                f"(batch.dead_group_limit): {self._deaths.told()}"
            )
        return NoteDead(env, self._deaths.count(env), warning) if warning else None


def _queued(rollout: RolloutId, env: EnvName, samples: tuple[Sample, ...]) -> Queued:
    return Queued(
        rollout=rollout,
        env=env,
        samples=samples,
        tokens=sum([len(sample.token_ids) for sample in samples]),
        oldest_version=min([version for sample in samples for version, _ in sample.versions]),
    )


def _trainable(entry: Queued) -> int:
    return sum([sample.trainable_tokens for sample in entry.samples])


def _stale(entry: Queued, action: StaleAction, tokens: int, step: int, bound: int) -> Stale:
    steps = staleness(entry.oldest_version, step)
    return Stale(
        rollout=entry.rollout,
        env=entry.env,
        action=action,
        tokens=tokens,
        staleness=steps,
        reason=f"stale in queue: v{entry.oldest_version} is {steps} steps behind, bound {bound}",
    )


def masked(samples: Sequence[Sample], oldest: Version) -> tuple[Sample, ...]:
    """The samples with tokens of versions before `oldest` not trainable, without those that then train nothing."""
    kept: list[Sample] = []
    for sample in samples:
        if sample.oldest_version >= oldest:
            kept.append(sample)
        elif any(version >= oldest for version, _ in sample.versions):
            kept.append(_masked_sample(sample, oldest))
    return tuple(kept)


def oldest_masked(samples: Sequence[Sample], tokens: int, before: Sequence[Version]) -> Version:
    """The version from which on tokens were kept, when `tokens` of `samples` were masked. `before` are earlier masks.

    InvariantError when no version does that.
    """
    oldest = max(before, default=0)
    counts: Counter[Version] = Counter()
    for sample in samples:
        for version, count in sample.versions:
            if version >= oldest:
                counts[version] += count
    total = 0
    for version in sorted(counts):
        total += counts[version]
        if total == tokens:
            return version + 1
    raise InvariantError(f"{tokens} tokens were masked of {dict(counts)}: no version is that old")


def _masked(entry: Queued, oldest: Version) -> Queued | None:
    """The entry with its tokens before `oldest` not trainable; None when no trainable token is left."""
    samples = masked(entry.samples, oldest)
    return _queued(entry.rollout, entry.env, samples) if samples else None


def _masked_sample(sample: Sample, oldest: Version) -> Sample:
    versions, counts = (np.array(column) for column in zip(*sample.versions, strict=True))
    old = np.flatnonzero(sample.trainable)[np.repeat(versions < oldest, counts)]
    trainable, logprobs = sample.trainable.copy(), sample.logprobs.copy()
    trainable[old], logprobs[old] = False, 0.0
    advantage = sample.advantage
    if isinstance(advantage, np.ndarray):
        advantage = advantage.copy()
        advantage[old] = 0.0
        advantage.setflags(write=False)
    for array in (trainable, logprobs):
        array.setflags(write=False)
    return msgspec.structs.replace(
        sample,
        trainable=trainable,
        logprobs=logprobs,
        advantage=advantage,
        versions=tuple([run for run in sample.versions if run[0] >= oldest]),
    )
