"""What a core still holds of rollouts: the records that a later life of its run could need."""

from __future__ import annotations

from paceline.core.scheduler import Core
from paceline.domain.ids import RolloutId


def unsettled(core: Core) -> list[RolloutId]:
    """Rollouts in flight, of train groups without verdicts, and in the batch list."""
    groups = [g for g in (*core.groups.groups(), *core.processing.values()) if g.task.split == "train"]
    ended = [rollout.id for group in groups for rollout in (*group.arrived, *group.retries)]
    return [*(flight.id for flight in core.flights.all()), *ended, *core.list.waiting()]
