"""Groups: the rollouts of one draw of a task, and what became of each once the group closed."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from paceline.domain.ids import GroupId, RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef

Fate: TypeAlias = Literal[
    "queued",
    "shipped",
    "zero_signal",
    "filtered",
    "stale",
    "failed",
    "cancelled",
    "truncated",
    "overlong",
    "void",
    "eval",
    "left_over",
    "discarded",
    "deferred",
]
"""Where a rollout's tokens went. `queued` is the only one that can still change.

`truncated`: truncated and not trained, by policy or because nobody scored it. `overlong`: dropped (or, in
tokens, cut) for being longer than the sequence length. `void`: its group was all-or-nothing and incomplete.
`left_over`: still queued when the run ended. `discarded`: thrown away by the scheduling policy, finished or not, or
refused by a gate of its environment.
`deferred`: put off by it, and sampled again from the beginning with the same noise.
"""


class ClosedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group whose members have all ended; what the sink works on."""

    id: GroupId
    task: TaskRef
    size: int
    rollouts: tuple[Rollout, ...]
    """The last attempt of every member that was launched, in order of arrival; at most `size`."""
    needs: int = 0
    """Members that make it whole, where more were started than count; 0 stands for `size`."""
    references: tuple[float, ...] = ()
    """What the members are compared with instead of each other, when this is the rest of a group that was put off: the
    rewards of the siblings that ended before."""
    fallback: float | None = None
    """What a member is compared with that ended alone, where its siblings were put off; None where nothing is."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What processing decided about one rollout of a closed group."""

    rollout: RolloutId
    fate: Fate
    """`queued` when it may train, else the reason it does not."""
    reason: str = ""
    samples: tuple[Sample, ...] = ()
    advantage: float | None = None
    """The scalar (or mean per-token) advantage, for metrics; None for a rollout that did not vote."""
    flags: tuple[str, ...] = ()
    """Filters that detected something, whether or not they enforce."""
    prefix_breaks: int = 0
    """Times a later prompt did not extend the ids so far, so that a new sample began."""


class GroupResult(msgspec.Struct, frozen=True, gc=False):
    """The whole outcome of processing one closed group."""

    group: GroupId
    verdicts: tuple[Verdict, ...]
    reward_mean: float | None = None
    """Over the members that voted; None when nobody did."""
    reward_variance: float | None = None
    """Population variance over the members that voted."""
    dead: str | None = None
    """Why nothing of this group can train (`failed`, `void`, `filtered`, `zero_signal`, …); else None."""
    references: tuple[float, ...] = ()
    """Rewards that voted here, for the baseline of the members that were put off; empty when none was."""
