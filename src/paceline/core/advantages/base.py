"""What an algorithm is: the rewards of one closed group in, advantages out.

An algorithm is pure. What it needs from outside, a teacher's logprobs or a judge's opinion, it asks for with
`requests`; the shell fetches the answers with bounded concurrency and hands them to `advantages` in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.ids import GroupId
from paceline.domain.rollout import Ending, Rollout
from paceline.domain.sample import Sample, Stream
from paceline.domain.task import TaskRef
from paceline.errors import PacelineError

PerSample: TypeAlias = tuple[tuple[NDArray[np.float32], ...], ...]
"""For each member of the view, for each of its samples, float32[T]."""

SAME_REWARD = 2.0**-22
"""Rewards that differ by less than this share of their size are one reward: two units in float32's last place.

Without it, 0.1 + 0.2 against 0.3 is a spread, and dividing by a spread makes advantages of 1 out of rounding.
"""


class AlgorithmError(PacelineError):
    """An algorithm answered something that cannot be trained on. Its group trains nothing; the user acts."""


class ServiceRequest(msgspec.Struct, frozen=True):
    """One question to the outside."""

    service: str
    """Which of the run's `services` answers it."""
    payload: Any


class GroupView(msgspec.Struct, frozen=True):
    """A closed group as an algorithm sees it: the n members that vote or may train, in order of arrival.

    Members that failed, were cancelled or were not scored are not in it. Arrays have length n and are read-only.
    """

    group: GroupId
    task: TaskRef
    rewards: NDArray[np.float64]
    votes: NDArray[np.bool_]
    """Whether the member counts in the baseline; all do unless the environment keeps truncated ones out."""
    sampled_tokens: NDArray[np.int64]
    """Sampled tokens before any cut."""
    turns: NDArray[np.int64]
    endings: tuple[Ending, ...]
    rollouts: tuple[Rollout, ...]
    samples: tuple[tuple[Sample, ...], ...]
    """The samples of each member that may train; empty for one that only votes."""
    references: NDArray[np.float64] = np.zeros(0)
    """What these members are compared with instead of each other: rewards of siblings whose group closed before. Empty
    unless this is the rest of a group that was put off."""

    def __len__(self) -> int:
        return len(self.rollouts)


class Advantages(msgspec.Struct, frozen=True):
    """What an algorithm answers."""

    values: NDArray[np.float64] | PerSample
    """float64[n], one number for all trainable tokens of a member; or per token, shaped like `view.samples`."""
    streams: Mapping[str, tuple[tuple[Stream, ...], ...]] = {}
    """Named per-token arrays [T, ...] for the trainer, shaped like `view.samples`: `loss_weights` and the like."""


@runtime_checkable
class Algorithm(Protocol):
    """Derive from this (or just look like it) and name your class in the config as `module:Class`."""

    @property
    def name(self) -> str:
        """What errors call it; its class's name by default."""
        return type(self).__name__

    def requests(self, view: GroupView) -> Sequence[ServiceRequest]:
        """What must be fetched before `advantages` can be computed; nothing by default."""
        return ()

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        """Advantages of every member of `view`; `replies` answer `requests`, in order."""
        ...


def centred(view: GroupView) -> NDArray[np.float64]:
    """Reward minus the mean of those that vote, or of the references where there are any; exactly 0 everywhere when no
    reward differs or nobody votes."""
    rewards = view.rewards
    voting = rewards if view.votes.all() else rewards[view.votes]
    if len(view.references):
        voting = view.references
        if not _differ(np.concatenate([rewards, voting])):
            return np.zeros(len(rewards))
    elif not len(voting) or not _differ(rewards):
        return np.zeros(len(rewards))
    difference: NDArray[np.float64] = rewards - np.add.reduce(voting) / len(voting)
    return difference


def spread(view: GroupView) -> float:
    """Population standard deviation of the rewards that vote; exactly 0 when none differs."""
    voting = np.concatenate([view.rewards[view.votes], view.references])
    return float(voting.std()) if len(voting) and _differ(voting) else 0.0


def _differ(rewards: NDArray[np.float64]) -> bool:
    low, high = float(np.minimum.reduce(rewards)), float(np.maximum.reduce(rewards))
    return high - low > SAME_REWARD * max(abs(low), abs(high))
