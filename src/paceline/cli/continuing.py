"""Which rollouts of an earlier life go on, and which end with it. See `docs/continuing.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.cli.resume import Resumption
from paceline.core.parts import UnderWay, lost_rollout, may_go_on
from paceline.domain.ids import EnvName, RolloutId
from paceline.domain.part import Part
from paceline.domain.rollout import Rollout
from paceline.domain.task import Split
from paceline.runtime.calls import EnvRuntime


class Left(NamedTuple):
    """What an earlier life left under way."""

    goes_on: dict[RolloutId, tuple[Part, ...]]
    """With the tokens it has, in the order of the start."""
    ended: tuple[Rollout, ...]
    """Records of the others."""

    @property
    def tokens(self) -> int:
        """Of what goes on."""
        return sum([part.tokens for parts in self.goes_on.values() for part in parts])


def left_by(resumption: Resumption | None, runtimes: Mapping[tuple[Split, EnvName], EnvRuntime]) -> Left:
    """By what the environments of this life say of themselves."""
    if resumption is None:
        return Left({}, ())
    goes_on: dict[RolloutId, tuple[Part, ...]] = {}
    ended = []
    for each in resumption.under_way:
        parts = resumption.parts.get(each.id)
        if parts is not None and _may_go_on(each, parts, runtimes.get((each.task.split, each.task.env))):
            goes_on[each.id] = parts
        else:
            ended.append(lost_rollout(each.id, each.task, resumption.at))
    return Left(goes_on, tuple(ended))


def _may_go_on(each: UnderWay, parts: tuple[Part, ...], runtime: EnvRuntime | None) -> bool:
    if runtime is None or runtime.environment.whole_group:
        return False
    return may_go_on(parts, is_replayable=runtime.environment.replayable)
