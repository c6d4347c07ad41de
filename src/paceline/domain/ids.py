"""Names for things. Everything else refers to them by these."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Version: TypeAlias = int
"""Optimizer steps behind the weights: v0 is the initial policy, the trainer's step n makes vn."""

GroupId: TypeAlias = int
"""One draw of one task, counted from 0 over the run (train and eval share the count)."""

EngineId: TypeAlias = str
EnvName: TypeAlias = str


class RolloutId(NamedTuple):
    """One attempt at one member of one group. A retry is a new rollout with the next `attempt`."""

    group: GroupId
    member: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"g{self.group}.m{self.member}.a{self.attempt}"


def parse_rollout_id(text: str) -> RolloutId:
    """The inverse of `str(RolloutId)`. ValueError when `text` is not one."""
    group, member, attempt = text.split(".")
    if (group[:1], member[:1], attempt[:1]) != ("g", "m", "a"):
        raise ValueError(f"{text!r} is not a rollout id; expected the form g12.m3.a0")
    return RolloutId(int(group[1:]), int(member[1:]), int(attempt[1:]))
