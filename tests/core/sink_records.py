"""Small records for tests of the sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.core.processing import GroupRules
from paceline.domain.group import ClosedGroup, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Outcome, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.domain.task import TaskRef

TASK = TaskRef("env", "train", 0)
TRUNCATED = Outcome("truncated", "tokens")
FAILED = Outcome("failed", "engine", "EngineError: gone")
CANCELLED = Outcome("cancelled", "overload")


def turn(
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Any = None,
    *,
    extends: bool = True,
    versions: Any = None,
    finish: Any = "stop",
) -> Turn:
    """`logprobs` are -0.5 each, and the version is 0, unless told."""
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.full(len(sampled), -0.5, np.float32)
        if logprobs is None
        else np.array(logprobs, np.float32),
        versions=((0, len(sampled)),) if versions is None else versions,
        extends=extends,
        finish=finish,
    )


def rollout(
    *turns: Turn,
    reward: float | None = 1.0,
    outcome: Outcome = COMPLETED,
    group: int = 0,
    member: int = 0,
    **more: Any,
) -> Rollout:
    """One turn of [1, 2] and the sampled [3] unless told."""
    return Rollout(
        id=RolloutId(group, member),
        task=more.pop("task", TASK),
        outcome=outcome,
        turns=turns or (turn([1, 2], [3]),),
        reward=reward,
        **more,
    )


def closed(*rollouts: Rollout, size: int | None = None, group: int = 0, task: TaskRef = TASK) -> ClosedGroup:
    """The rollouts as members of one group, numbered in order."""
    members = tuple(
        msgspec.structs.replace(each, id=RolloutId(group, member), task=task)
        for member, each in enumerate(rollouts)
    )
    return ClosedGroup(group, task, size or len(members), members)


def rewarded(*rewards: float | None) -> ClosedGroup:
    """A group of one-turn rollouts with these rewards; None is a failed one."""
    return closed(*[rollout(reward=r, outcome=FAILED if r is None else COMPLETED) for r in rewards])


def rules(**changes: Any) -> GroupRules:
    return msgspec.structs.replace(GroupRules(env="env", seq_len=64), **changes)


def sample(tokens: int = 4, *, group: int = 0, member: int = 0, version: int = 0, **changes: Any) -> Sample:
    """The first token is a prompt, the rest is trainable, sampled by `version`."""
    trainable = np.ones(tokens, np.bool_)
    trainable[0] = False
    made = Sample(
        token_ids=np.arange(tokens, dtype=np.int32),
        trainable=trainable,
        logprobs=np.where(trainable, np.float32(-0.5), np.float32(0)),
        versions=((version, tokens - 1),),
        rollout=RolloutId(group, member),
        env="env",
        task_index=0,
        ending="completed",
        reward=1.0,
        temperature=1.0,
        advantage=0.5,
    )
    return msgspec.structs.replace(made, **changes)


def queued(*samples: Sample) -> Verdict:
    return Verdict(samples[0].rollout, "queued", samples=samples)
