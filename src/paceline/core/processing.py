"""A closed group becomes verdicts: who votes, who trains, with which advantage, and why the others do not.

    endings -> records to samples -> pre-filters -> vote -> algorithm -> advantages onto samples -> post-filter

Pure, and run once a group in a worker thread. Nothing here raises for what a rollout holds: a record that cannot be
trained on is a failed rollout. An algorithm that answers nonsense raises AlgorithmError; `broken_group` is then the
result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self

import msgspec
import numpy as np

from paceline.config.batch import BatchSection
from paceline.config.environment import EnvSection
from paceline.config.filters import FiltersSection, PreFilter
from paceline.core.advantages.answers import attach
from paceline.core.advantages.base import Advantages, Algorithm, GroupView, ServiceRequest
from paceline.core.filters import detect, has_signal
from paceline.core.observations import observed
from paceline.core.samples import Built, RecordRefused, build_samples
from paceline.domain.group import ClosedGroup, Fate, GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample

_FURTHEST: tuple[Fate, ...] = (
    "zero_signal",
    "filtered",
    "overlong",
    "truncated",
    "void",
    "failed",
    "stale",
    "deferred",
    "discarded",
    "cancelled",
)
"""A dead group is named after the member that came furthest."""


_POLICY_FATES: dict[str, Fate] = {"stale": "stale", "deferred": "deferred", "discarded": "discarded"}
"""Causes of a cancellation that are fates of their own."""


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the groups of one environment."""

    env: str
    seq_len: int
    overlong: Literal["cut", "drop"] = "cut"
    truncated_votes: bool = True
    truncated_trains: bool = True
    all_or_nothing: bool = False
    filtered_vote: bool = True
    zero_advantage: bool = True
    zero_advantage_threshold: float = 0.0
    pre: tuple[PreFilter, ...] = ()
    observation_weight: float = 0.0

    @classmethod
    def of(
        cls, env: EnvSection, batch: BatchSection, filters: FiltersSection, *, scores_groups: bool = False
    ) -> Self:
        """From the config; `scores_groups` is the environment's own word on whether it scores groups whole."""
        return cls(
            env=env.label,
            seq_len=batch.seq_len,
            overlong=batch.overlong,
            truncated_votes=env.truncated_votes,
            truncated_trains=env.truncated_trains,
            all_or_nothing=scores_groups if env.all_or_nothing is None else env.all_or_nothing,
            filtered_vote=filters.filtered_vote,
            zero_advantage=filters.zero_advantage,
            zero_advantage_threshold=filters.zero_advantage_threshold,
            pre=filters.pre,
            observation_weight=env.observation_weight,
        )


class Build(Protocol):
    """`core.samples.build_samples`, or what stands for it."""

    def __call__(self, rollout: Rollout, *, seq_len: int, overlong: Literal["cut", "drop"]) -> Built: ...


class _Member(msgspec.Struct):
    """A rollout on its way to a verdict."""

    rollout: Rollout
    fate: Fate = "queued"
    reason: str = ""
    built: Built | None = None
    """None when there is nothing that could vote or train."""
    votes: bool = False
    flags: tuple[str, ...] = ()


def asks_nothing(algorithm: Algorithm) -> bool:
    """Whether an algorithm never asks for anything to be fetched."""
    return getattr(type(algorithm), "requests", None) is Algorithm.requests


def service_requests(
    group: ClosedGroup, rules: GroupRules, algorithm: Algorithm
) -> tuple[ServiceRequest, ...]:
    """What the algorithm must have fetched before `process_group`; costs nothing when it never asks."""
    if asks_nothing(algorithm):
        return ()
    members = _members(group, rules)
    return tuple([request for role in _by_role(members) for request in _asked(group, role, algorithm)])


def _asked(
    group: ClosedGroup, members: Sequence[_Member], algorithm: Algorithm
) -> tuple[ServiceRequest, ...]:
    if asks_nothing(algorithm):
        return ()
    if not any(member.fate == "queued" for member in members):
        return ()
    return tuple(algorithm.requests(_view(group, members)))


def _by_role(members: Sequence[_Member]) -> list[list[_Member]]:
    """Members that are compared with each other: all, unless several agents played."""
    roles: dict[str, list[_Member]] = {}
    for member in members:
        roles.setdefault(member.rollout.role, []).append(member)
    return list(roles.values())


def process_group(
    group: ClosedGroup,
    rules: GroupRules,
    algorithm: Algorithm,
    replies: Sequence[Any] = (),
    *,
    build: Build = build_samples,
) -> GroupResult:
    """The verdict on every rollout of a closed group. AlgorithmError when the algorithm answers nonsense.

    `build` makes the samples of a rollout; a simulation has records without contents, and makes them at no cost.
    """
    members = _members(group, rules, build)
    voting = [float(m.rollout.reward) for m in members if m.votes and m.rollout.reward is not None]
    roles = _by_role(members)
    if len(roles) == 1:
        verdicts = _of_role(group, members, replies, rules, algorithm)
    else:
        # In the order of the requests; the verdicts in the order of arrival.
        by_id: dict[RolloutId, Verdict] = {}
        answers = list(replies)
        for role in roles:
            asked = len(_asked(group, role, algorithm))
            mine, answers = answers[:asked], answers[asked:]
            for verdict in _of_role(group, role, mine, rules, algorithm):
                by_id[verdict.rollout] = verdict
        verdicts = tuple([by_id[member.rollout.id] for member in members])
    mean = math.fsum(voting) / len(voting) if voting else None
    return GroupResult(
        group=group.id,
        verdicts=verdicts,
        reward_mean=mean,
        reward_variance=None if mean is None else math.fsum([(r - mean) ** 2 for r in voting]) / len(voting),
        dead=_dead(verdicts),
        references=tuple(voting) if any([m.fate == "deferred" for m in members]) else (),
    )


def _of_role(
    group: ClosedGroup,
    members: Sequence[_Member],
    replies: Sequence[Any],
    rules: GroupRules,
    algorithm: Algorithm,
) -> tuple[Verdict, ...]:
    if not any([member.fate == "queued" for member in members]):
        return tuple([_verdict(member) for member in members])
    view = _view(group, members)
    return _judged(members, view, algorithm.advantages(view, replies), rules, algorithm.name)


def broken_group(group: ClosedGroup, error: str) -> GroupResult:
    """The result when the algorithm or its I/O failed: what could have trained is failed, with the cause."""
    verdicts = tuple(
        _verdict(member)
        if (member := _ending(rollout)).fate != "queued"
        else Verdict(rollout.id, "failed", f"algorithm: {error}")
        for rollout in group.rollouts
    )
    return GroupResult(group=group.id, verdicts=verdicts, dead=_dead(verdicts))


def _members(group: ClosedGroup, rules: GroupRules, build: Build = build_samples) -> list[_Member]:
    members = [_examined(_ending(rollout), rules, build) for rollout in group.rollouts]
    if rules.all_or_nothing:
        needs = group.needs or group.size
        scored = sum([member.built is not None for member in members])
        if scored < needs:
            members = _all(
                members, "void", f"all-or-nothing: {needs - scored} of {needs} members have no score"
            )
    return members


def _all(members: Sequence[_Member], fate: Fate, why: str) -> list[_Member]:
    """The same fate for every member that was scored."""
    return [m if m.built is None else _Member(m.rollout, fate, why, flags=m.flags) for m in members]


def _ending(rollout: Rollout) -> _Member:
    """Sort out those that nobody can learn from, by how they ended and whether they were scored."""
    ending, reward = rollout.outcome.ending, rollout.reward
    if ending == "failed" or ending == "cancelled":
        outcome = rollout.outcome
        fate: Fate = ending
        if ending == "cancelled":
            fate = _POLICY_FATES.get(outcome.cause or "", "cancelled")
        return _Member(rollout, fate, f"{outcome.cause}: {outcome.detail}".strip(": "))
    if reward is None:
        if not rollout.trains:
            return _Member(rollout, "filtered", _frozen(rollout))
        if ending == "truncated":
            return _Member(rollout, "truncated", f"{rollout.outcome.cause}: truncated and not scored")
        return _Member(rollout, "failed", "unscored: completed without a reward")
    if not math.isfinite(reward):
        return _Member(rollout, "failed", f"data: env {rollout.task.env!r} gave the reward {reward}")
    return _Member(rollout)


def _examined(member: _Member, rules: GroupRules, build: Build) -> _Member:
    """Build the samples of a scored rollout, and apply every rule that needs no comparison with its siblings."""
    if member.fate != "queued":
        return member
    rollout = member.rollout
    try:
        built = build(rollout, seq_len=rules.seq_len, overlong=rules.overlong)
    except RecordRefused as refused:
        return _Member(rollout, "failed", f"{refused.cause}: env {rules.env!r}: {refused}")
    truncated = built.ending == "truncated"
    member.built = built
    member.votes = rules.truncated_votes if truncated else True
    if not rollout.trains:
        member.votes = False
        member.fate, member.reason = "filtered", _frozen(rollout)
    elif built.overlong:
        member.fate, member.reason = "overlong", built.overlong
    elif truncated and not rules.truncated_trains:
        member.fate, member.reason = (
            "truncated",
            f"{rollout.outcome.cause or 'cut'}: truncated ones do not train",
        )
    if rules.pre:
        flags = detect(rules.pre, rollout)
        member.flags = tuple(dict.fromkeys([flag.filter for flag in flags]))
        for flag in flags:
            if flag.enforce:
                if member.fate == "queued":
                    member.fate, member.reason = "filtered", f"{flag.filter}: {flag.reason}"
                member.votes = member.votes and rules.filtered_vote
                break
    return member


def _frozen(rollout: Rollout) -> str:
    return f"role {rollout.role!r} is frozen: it is played against"


def _in_view(member: _Member) -> bool:
    return member.votes or member.fate == "queued"


def _references(group: ClosedGroup, members: Sequence[_Member]) -> tuple[float, ...]:
    """What the members are compared with, if not with each other."""
    if group.references or group.fallback is None or sum([m.votes for m in members]) != 1:
        return group.references
    return (group.fallback,)


def _view(group: ClosedGroup, members: Sequence[_Member]) -> GroupView:
    seen = [member for member in members if _in_view(member)]
    rollouts = tuple([member.rollout for member in seen])
    arrays = (
        np.array(_references(group, members), np.float64),
        np.array([rollout.reward for rollout in rollouts], np.float64),
        np.array([member.votes for member in seen], np.bool_),
        np.array([member.built.generated_tokens for member in seen if member.built], np.int64),
        np.array([len(rollout.turns) for rollout in rollouts], np.int64),
    )
    for array in arrays:
        array.setflags(write=False)
    references, rewards, votes, sampled_tokens, turns = arrays
    return GroupView(
        group=group.id,
        task=group.task,
        rewards=rewards,
        votes=votes,
        sampled_tokens=sampled_tokens,
        turns=turns,
        endings=tuple([member.built.ending for member in seen if member.built]),
        rollouts=rollouts,
        samples=tuple([_trains(member) for member in seen]),
        references=references,
    )


def _trains(member: _Member) -> tuple[Sample, ...]:
    return member.built.samples if member.built and member.fate == "queued" else ()


def _verdict(member: _Member, samples: tuple[Sample, ...] = (), advantage: float | None = None) -> Verdict:
    return Verdict(
        rollout=member.rollout.id,
        fate=member.fate,
        reason=member.reason,
        samples=samples,
        advantage=advantage,
        flags=member.flags,
        prefix_breaks=member.built.prefix_breaks if member.built else 0,
    )


def _judged(
    members: Sequence[_Member], view: GroupView, answer: Advantages, rules: GroupRules, algorithm: str
) -> tuple[Verdict, ...]:
    """Verdicts once the algorithm has answered."""
    answers = iter(attach(view, answer, algorithm))
    verdicts: list[Verdict] = []
    for member in members:
        if not _in_view(member):
            verdicts.append(_verdict(member))
            continue
        samples, advantage = next(answers)
        if samples and rules.zero_advantage and not has_signal(samples, rules.zero_advantage_threshold):
            member.fate, samples = "zero_signal", ()
            member.reason = f"no advantage beyond {rules.zero_advantage_threshold:g}"
        if samples and rules.observation_weight:
            samples = observed(member.rollout, samples, rules.observation_weight)
        verdicts.append(_verdict(member, samples, advantage))
    return tuple(verdicts)


def _dead(verdicts: Sequence[Verdict]) -> str | None:
    fates = {verdict.fate for verdict in verdicts}
    if "queued" in fates:
        return None
    return next((fate for fate in _FURTHEST if fate in fates), "cancelled")
