"""A recorded run as a workload: its rollouts again, with their turns, waits and rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.domain import events as on
from paceline.domain.commands import StartRollout
from paceline.domain.ids import EnvName
from paceline.domain.rollout import COMPLETED, Outcome, Rollout, Turn
from paceline.errors import ConfigError
from paceline.sim.plan import RolloutPlan, Start
from paceline.sim.requests import Record


class Recorded:
    """Group n of an environment is its n-th recorded group, over and over; member m its m-th member."""

    def __init__(
        self, groups: dict[EnvName, list[list[RolloutPlan]]], sizes: dict[EnvName, int] | None = None
    ) -> None:
        """`sizes`: members of a group, by environment; None: as many as the largest has."""
        self.groups = groups
        """By environment: the plans of each group's members."""
        self.sizes = sizes or {env: max(map(len, each)) for env, each in groups.items()}

    @classmethod
    def of(cls, records: Iterable[Record]) -> Recorded:
        """From the records of a journal. Only what ended by itself is taken: what a cancel cut short says nothing about how
        long it would have been. ConfigError when nothing is left."""
        by_group: dict[EnvName, dict[int, dict[int, RolloutPlan]]] = defaultdict(lambda: defaultdict(dict))
        sizes: dict[EnvName, int] = {}
        for _, event, commands in records:
            for command in commands:
                if (
                    isinstance(command, StartRollout)
                    and command.task.split == "train"
                    and not command.put_off
                ):
                    size = command.group_needs or command.group_size or command.rollout.member + 1
                    sizes[command.task.env] = max(size, sizes.get(command.task.env, 0))
            if not isinstance(event, on.RolloutEnded):
                continue
            rollout = event.rollout
            ended_itself = rollout.outcome.ending in ("completed", "truncated")
            if rollout.task.split == "train" and ended_itself and rollout.sampled_tokens:
                by_group[rollout.task.env][rollout.id.group][rollout.id.member] = plan_of(rollout)
        if not by_group:
            raise ConfigError(
                "the journal holds no training rollout that ended by itself: nothing to simulate"
            )
        # In the order in which they were started, and not in that in which they ended: that is by length.
        return cls(
            {
                env: [[plan for _, plan in sorted(groups[number].items())] for number in sorted(groups)]
                for env, groups in by_group.items()
            },
            {
                env: sizes.get(env) or 1 + max(member for group in groups.values() for member in group)
                for env, groups in by_group.items()
            },
        )

    @property
    def longest(self) -> int:
        return max(plan.context for groups in self.groups.values() for group in groups for plan in group)

    def named(self, env: EnvName) -> Recorded:
        """The groups of its environment `env`, or those of its only one under that name. ConfigError when it has several, and
        none is called so."""
        if env in self.groups:
            of = env
        elif len(self.groups) == 1:
            (of,) = self.groups
        else:
            names = ", ".join(map(repr, sorted(self.groups)))
            raise ConfigError(
                f"the recorded run has the environments {names}, and none is called {env!r}: give each a [[workload.env]] of its "
                "own, whose `name` is the environment's"
            )
        return Recorded({env: self.groups[of]}, {env: self.sizes[of]})

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        groups = self.groups[command.task.env]
        group = groups[command.task.index % len(groups)]
        return group[command.rollout.member % len(group)]


def plan_of(rollout: Rollout) -> RolloutPlan:
    """What a finished rollout did."""
    turns: list[tuple[float, int, int]] = []
    starts = _starts(rollout.turns)
    before = rollout.started
    for number, turn in enumerate(rollout.turns):
        observed = len(turn.prompt_ids) if number else 0
        if starts and (start := starts[number]) is not None and start.after < 0:
            observed -= start.kept
        wait = max(0.0, turn.started - turn.queued_s - before)
        turns.append((wait, observed, len(turn.sampled_ids)))
        before = turn.ended
    outcome = rollout.outcome
    return RolloutPlan(
        prompt=len(rollout.turns[0].prompt_ids),
        turns=tuple(turns),
        score_s=max(0.0, rollout.ended - before),
        reward=rollout.reward,
        outcome=COMPLETED if outcome.ending == "completed" else Outcome("truncated", outcome.cause),
        starts=starts,
    )


def _starts(turns: Sequence[Turn]) -> tuple[Start | None, ...]:
    """Of each turn, from the ids. A prompt that begins with all of a conversation's first one goes on with that conversation,
    however far its last context is alike; any other begins one of its own, and is taken to be alike to nothing."""
    if all(turn.extends and turn.after in (-1, number) for number, turn in enumerate(turns[1:])):
        return ()
    starts: list[Start | None] = []
    ends: list[NDArray[np.int32]] = []
    """By turn: its context, with what it sampled."""
    of: list[int] = []
    """By turn: its conversation."""
    last: list[NDArray[np.int32]] = []
    """By conversation: its last context."""
    firsts: list[int] = []
    """By conversation: tokens of its first prompt."""
    for number, turn in enumerate(turns):
        prompt, start = turn.prompt_ids, None
        if number and turn.extends:
            before = number - 1 if turn.after < 0 else turn.after
            conversation, kept = of[before], ends[before]
            if before < number - 1:
                found = _alike(kept, last[conversation])
                start = Start(kept=len(kept), after=before, conversation=conversation, found=found)
            prompt = np.append(kept, prompt)
        else:
            alike = (
                [_alike(prompt, context) for context in last] if prompt.any() else []
            )  # blank: a simulated run's
            going_on = [n for n, tokens in enumerate(alike) if tokens >= firsts[n]]
            conversation = max(going_on, key=alike.__getitem__, default=len(last))
            if number:
                found = alike[conversation] if going_on else 0
                start = Start(kept=found, conversation=conversation, found=found)
            if not going_on:
                last.append(prompt)
                firsts.append(len(prompt))
        starts.append(start)
        of.append(conversation)
        last[conversation] = np.append(prompt, turn.sampled_ids)
        ends.append(last[conversation])
    return tuple(starts)


def _alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    length, at, step = min(len(one), len(other)), 0, 64
    while at < length:
        end = min(length, at + step)
        if (differs := one[at:end] != other[at:end]).any():
            return at + int(differs.argmax())
        at, step = end, 2 * step
    return length
