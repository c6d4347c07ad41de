"""What a gate is: it sees how a group went, and says whether the group may train, and whether its task rests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from paceline.domain.group import GroupResult


class Outcome(msgspec.Struct, frozen=True):
    """How a group of a task went, as a gate sees it."""

    task: int
    """The task's index in its source."""
    reward_mean: float | None
    """Over the members that voted; None when nobody did."""
    reward_variance: float | None
    advantages: tuple[float, ...]
    """Of the members that may train, each the mean over its tokens; empty when none may."""

    @classmethod
    def of(cls, task: int, result: GroupResult) -> Outcome:
        """From the verdicts on a group."""
        listed = [verdict for verdict in result.verdicts if verdict.fate == "queued"]
        advantages = tuple([v.advantage for v in listed if v.advantage is not None])
        return cls(task, result.reward_mean, result.reward_variance, advantages)


class Judgement(msgspec.Struct, frozen=True):
    """What a gate says of a group."""

    refuses: str = ""
    """Why the group may not train; empty if it may."""
    rests: int = 0
    """Draws of its environment during which the task is passed over."""


PASSES = Judgement()
"""The group may train, and its task be drawn again."""


class Gate(Protocol):
    """Judges the groups of one environment. Derive from it, or just look like it, and name your class in the config as
    `module:Class`; it is made with `(size, seed, **args)`, `size` None for an endless source.

    Pure: a judgement depends on the seed and on what was judged before.
    """

    def __init__(self, size: int | None, seed: int, **args: Any) -> None: ...

    def judge(self, outcome: Outcome) -> Judgement:
        """A group was processed. Asked of every group, one that brings nothing included, in the order of processing."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """State for `restore`; msgpack-able."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Stateless(Gate):
    """A gate that goes by the group alone."""

    def snapshot(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
