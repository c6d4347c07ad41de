"""A recorded run as a workload: its rollouts again, with their turns, waits and rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paceline.domain import events as on
from paceline.domain.commands import StartRollout
from paceline.domain.events import Event
from paceline.domain.ids import EnvName
from paceline.domain.rollout import COMPLETED, Outcome, Rollout
from paceline.errors import ConfigError
from paceline.sim.plan import RolloutPlan


class Recorded:
    """Group n of an environment is its n-th recorded group, over and over; member m its m-th member."""

    def __init__(self, groups: dict[EnvName, list[list[RolloutPlan]]]) -> None:
        self.groups = groups
        """By environment: the plans of each group's members."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Recorded:
        """From the events of a journal. Only what ended by itself is taken: what a cancel cut short says nothing about how
        long it would have been. ConfigError when nothing is left."""
        by_group: dict[EnvName, dict[int, dict[int, RolloutPlan]]] = defaultdict(lambda: defaultdict(dict))
        for event in events:
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
            }
        )

    @property
    def longest(self) -> int:
        return max(plan.context for groups in self.groups.values() for group in groups for plan in group)

    def named(self, env: EnvName) -> Recorded:
        """All its groups as those of one environment, in their order."""
        return Recorded({env: [group for groups in self.groups.values() for group in groups]})

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        groups = self.groups[command.task.env]
        group = groups[command.task.index % len(groups)]
        return group[command.rollout.member % len(group)]


def plan_of(rollout: Rollout) -> RolloutPlan:
    """What a finished rollout did."""
    turns: list[tuple[float, int, int]] = []
    before = rollout.started
    for number, turn in enumerate(rollout.turns):
        observed = len(turn.prompt_ids) if number else 0
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
    )
