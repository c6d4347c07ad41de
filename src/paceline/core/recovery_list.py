"""The batch list and the batches that are being shipped, as a journal tells of them: a part of `recovery`.

    GroupProcessed ─▶ the list ─ ShipBatch ─▶ being shipped ─ BatchShipped ─▶ gone
                       └─ NoteStale, NoteDiscarded: gone, or some of its tokens masked

Arrays are not in the log: samples are built again from the rollouts, and compared with what the log says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.core.accounting import Account
from paceline.core.batching import masked, oldest_masked
from paceline.core.plain import from_plain, to_plain
from paceline.core.rebuild import Extras, rebuild
from paceline.domain import commands as do
from paceline.domain.batch import Batch
from paceline.domain.ids import EnvName, RolloutId, Version, parse_rollout_id
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample
from paceline.errors import CannotFold


class _Entry:
    """A rollout in the batch list, as the log tells of it."""

    __slots__ = ("env", "masks", "samples", "since", "swept", "whole")

    def __init__(self, env: EnvName, samples: tuple[Sample, ...], since: int, whole: bool) -> None:
        self.env = env
        self.samples = samples
        self.since = since
        """Its rollout ended in no record before this one."""
        self.whole = whole
        """Whether the samples have their arrays: those of a checkpoint do, those of the log do not."""
        self.masks: list[Version] = []
        self.swept = False


class RecoveredList:
    """Rollouts that wait for their batch, and those of batches that are on their way to the trainer."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], account: Account) -> None:
        """`rows`: the batch list of a checkpoint. Tokens are moved in `account`."""
        self._account = account
        self._list: dict[RolloutId, _Entry] = {}
        for row in rows:
            rollout = parse_rollout_id(row["rollout"])
            samples = tuple([from_plain(rollout, row["env"], sample) for sample in row["samples"]])
            entry = self._list[rollout] = _Entry(row["env"], samples, 0, whole=True)
            entry.swept = row["swept"]
        self._shipping: dict[int, list[tuple[RolloutId, _Entry]]] = {}

    # ── taking in records ──

    def queued(self, rollout: RolloutId, env: EnvName, samples: tuple[Sample, ...], since: int) -> None:
        """It may train from now on. `since`: it ended in no record before this one."""
        self._list[rollout] = _Entry(env, samples, since, whole=False)

    def cut(self, batch: Batch) -> None:
        """A batch was cut, and is on its way."""
        self._shipping[batch.step] = [(rollout, self._list.pop(rollout)) for rollout in batch.rollouts]
        seen: set[RolloutId] = set()
        for sample in batch.samples:
            account = self._account.of("train", sample.env)
            account.move(
                "queued", "shipped", sample.trainable_tokens, rollouts=int(sample.rollout not in seen)
            )
            seen.add(sample.rollout)

    def shipped(self, step: int) -> None:
        self._shipping.pop(step, None)

    def stale(self, command: do.NoteStale) -> None:
        if (entry := self._list.get(command.rollout)) is None:
            return
        if command.action == "trained":
            entry.swept = True
            return
        dropped = command.action == "dropped"
        self._account.of("train", entry.env).move("queued", "stale", command.tokens, rollouts=int(dropped))
        if dropped:
            del self._list[command.rollout]
        else:
            entry.masks.append(oldest_masked(entry.samples, command.tokens, entry.masks))

    def discarded(self, command: do.NoteDiscarded) -> None:
        entry = self._list.pop(command.rollout)
        self._account.of("train", entry.env).move("queued", "discarded", command.tokens)

    # ── what comes of it ──

    @property
    def shipping(self) -> list[int]:
        """Steps of the batches on their way, in order."""
        return sorted(self._shipping)

    def needed(self) -> Iterator[tuple[RolloutId, int]]:
        """Rollouts whose records `batch` and `plain` need, and the record that each did not end before."""
        yield from [(rollout, e.since) for rollout, e in self._list.items() if not e.whole]
        for taken in self._shipping.values():
            yield from [(rollout, e.since) for rollout, e in taken if not e.whole]

    def batch(
        self, step: int, rollouts: Mapping[RolloutId, Rollout], extras: Mapping[RolloutId, Extras]
    ) -> Batch:
        """One that is on its way. CannotFold as `plain`."""
        taken = self._shipping[step]
        samples = [s for each, entry in taken for s in _samples(each, entry, rollouts, extras)]
        return Batch(step, tuple(samples), tuple([each for each, _ in taken]))

    def plain(
        self, rollouts: Mapping[RolloutId, Rollout], extras: Mapping[RolloutId, Extras]
    ) -> list[dict[str, Any]]:
        """The batch list of a checkpoint. CannotFold names a rollout whose samples cannot be built again as they were."""
        return [
            {
                "rollout": str(rollout),
                "env": entry.env,
                "swept": entry.swept,
                "samples": [to_plain(s) for s in _samples(rollout, entry, rollouts, extras)],
            }
            for rollout, entry in self._list.items()
        ]


def _samples(
    rollout: RolloutId,
    entry: _Entry,
    rollouts: Mapping[RolloutId, Rollout],
    extras: Mapping[RolloutId, Extras],
) -> tuple[Sample, ...]:
    samples = entry.samples
    if not entry.whole:
        if rollout not in rollouts:
            raise CannotFold(f"{rollout} waits for its batch, but is not in the rollout store")
        samples = rebuild(rollouts[rollout], samples, extras.get(rollout))
    for oldest in entry.masks:
        samples = masked(samples, oldest)
    return samples
