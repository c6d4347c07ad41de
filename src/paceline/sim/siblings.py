"""What the rollouts of a group have of each other: a beginning that caches share, and answers to take drafts from."""

from __future__ import annotations

from collections.abc import Hashable

from paceline.domain.ids import GroupId, Version
from paceline.sim.engine.calls import Chain
from paceline.sim.rollouts import SimRollout


class Siblings:
    """Of all open groups."""

    def __init__(self, block: int) -> None:
        """`block`: tokens of a KV block."""
        self._block = block
        self._chains: dict[GroupId, tuple[Version, Chain]] = {}
        self._begun: dict[GroupId, set[int]] = {}
        """Members that an engine has begun to answer."""

    def chain(self, rollout: SimRollout, version: Version) -> Chain:
        """What its context shares with others under one policy version, in whole blocks: in conversations that have not the
        group's prompt, nothing."""
        if rollout.conversation:
            return ()
        group = rollout.command.rollout.group
        known = self._chains.get(group)
        if known is not None and known[0] == version:
            return known[1]
        plan, block = rollout.plan, self._block
        parts: list[tuple[Hashable, int]] = []
        scaffold = plan.scaffold // block
        if scaffold:
            parts.append(((version, rollout.command.task.env), scaffold))
        prompt = (plan.scaffold + plan.prompt) // block - scaffold
        if prompt:
            parts.append(((version, group), prompt))
        chain = tuple(parts)
        self._chains[group] = version, chain
        return chain

    def references(self, rollout: SimRollout) -> int:
        """Other members that engines have begun to answer, now that one begins with this."""
        of = rollout.command.rollout
        begun = self._begun.setdefault(of.group, set())
        begun.add(of.member)
        return len(begun) - 1

    def forget(self, group: GroupId) -> None:
        """The group has closed."""
        self._chains.pop(group, None)
        self._begun.pop(group, None)
