"""Evals: which are due, when one is complete, and what it measured.

An eval never goes stale and never stops training. It is due when the engines come to hold a version, each point once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.config.environment import EvalSection
from paceline.domain.commands import ReportEval
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName, Version
from paceline.domain.rollout import Rollout
from paceline.errors import InvariantError

_NONE = -1
"""Before v0: nothing was measured yet."""


class Due(msgspec.Struct, frozen=True, gc=False):
    """One eval to run now."""

    env: EnvName
    version: Version
    """What the engines hold, and what it is reported under."""
    points: tuple[Version, ...]
    """The points it stands for: more than one, or another than `version`, when versions were jumped over."""
    reason: str


class _Timetable(msgspec.Struct):
    every: int
    at_start: bool
    at_end: bool
    opened: Version = _NONE
    """Newest version that an eval was opened for, or that passed without a point."""
    completed: Version = _NONE


class EvalPlan:
    """Says which evals are due when the engines come to hold a version.

    Points are the multiples of `every`, v0 only if `at_start`, and the last version if `at_end`. A point that was
    jumped over (v4 to v6 over v5) is measured with the version that came instead.
    """

    def __init__(self, sections: Sequence[EvalSection], *, last: Version) -> None:
        self._last = last
        self._envs = {s.label: _Timetable(s.every, s.at_start, s.at_end) for s in sections}

    def held(self, version: Version) -> tuple[Due, ...]:
        """Every engine holds at least `version`. Asking twice gives nothing the second time."""
        due: list[Due] = []
        for env, table in self._envs.items():
            if version <= table.opened:
                continue
            points = self._points(table, version)
            table.opened = version
            if points:
                names = ", ".join(f"v{point}" for point in points)
                due.append(Due(env, version, points, f"engines hold v{version}, due: {names}"))
        return tuple(due)

    def end_at(self, version: Version) -> None:
        """The run ends with this version, earlier than planned: it is the last point now."""
        self._last = version
        for table in self._envs.values():
            passed_without = version % table.every != 0 or (version == 0 and not table.at_start)
            if table.at_end and table.opened == version and passed_without:
                table.opened = version - 1

    def complete(self, env: EnvName, version: Version) -> None:
        """An eval was measured in full; a run resumed from here does not measure it again."""
        table = self._envs[env]
        table.completed = max(table.completed, version)

    def snapshot(self) -> dict[str, Any]:
        return {env: table.completed for env, table in self._envs.items()}

    def restore(self, data: dict[str, Any]) -> None:
        """Go on after what was completed: an eval that a crash cut short is due again. New evals start afresh."""
        for env, completed in data.items():
            if env in self._envs:
                table = self._envs[env]
                table.opened = table.completed = int(completed)

    def _points(self, table: _Timetable, version: Version) -> tuple[Version, ...]:
        first = (table.opened // table.every + 1) * table.every
        points = [p for p in range(first, version + 1, table.every) if p or table.at_start]
        if table.at_end and table.opened < self._last <= version and self._last not in points:
            points.append(self._last)
        return tuple(points)


class EvalEpoch:
    """One measurement: `examples` tasks, each rolled out exactly `k` times. Keeps numbers, not rollouts."""

    def __init__(self, env: EnvName, version: Version, *, examples: int, k: int) -> None:
        self.env = env
        self.version = version
        self.examples = examples
        self.k = k
        self._drawn = 0
        self._rewards: dict[int, list[float]] = {}
        self._endings: Counter[str] = Counter()
        self._tokens = 0
        self._launched = 0
        self._newest = version

    @property
    def undrawn(self) -> int:
        """Examples whose group has not been opened."""
        return self.examples - self._drawn

    @property
    def owed(self) -> int:
        """Rollouts that have not ended, launched or not."""
        return (self.examples - len(self._rewards)) * self.k

    @property
    def settled(self) -> int:
        """Examples that are accounted for."""
        return len(self._rewards)

    @property
    def complete(self) -> bool:
        return not self.owed

    def draw(self) -> int:
        """The next example to open a group of `k` for. InvariantError when all are drawn."""
        if not self.undrawn:
            raise InvariantError(
                f"eval {self.env} of v{self.version}: all {self.examples} examples are drawn"
            )
        self._drawn += 1
        return self._drawn - 1

    def settle(self, group: ClosedGroup) -> None:
        """Account for one example. Members that were never launched count as cancelled."""
        example = group.task.index
        if not 0 <= example < self._drawn or example in self._rewards:
            why = "was settled before" if example in self._rewards else "was not drawn"
            raise InvariantError(f"eval {self.env} of v{self.version}: example {example} {why}")
        if group.size != self.k or len(group.rollouts) > self.k:
            raise InvariantError(
                f"eval {self.env} of v{self.version}: example {example} has {len(group.rollouts)} rollouts in a "
                f"group of {group.size}, where k is {self.k}"
            )
        self._rewards[example] = [r for rollout in group.rollouts if (r := _score(rollout)) is not None]
        self._launched += len(group.rollouts)
        self._endings["cancelled"] += self.k - len(group.rollouts)
        for rollout in group.rollouts:
            self._endings[rollout.outcome.ending] += 1
            self._tokens += rollout.sampled_tokens
            newest = rollout.newest_version
            if newest is not None and newest > self._newest:
                self._newest = newest

    def report(self) -> ReportEval:
        """What was measured. InvariantError while rollouts are owed."""
        if not self.complete:
            raise InvariantError(f"eval {self.env} of v{self.version}: {self.owed} rollouts are owed")
        return self.so_far()

    def so_far(self) -> ReportEval:
        """The same of the examples that are settled, where others may be owed."""
        rewards = [self._rewards[example] for example in sorted(self._rewards)]
        scored = [reward for each in rewards for reward in each]
        total = len(rewards) * self.k
        return ReportEval(
            env=self.env,
            version=self.version,
            newest_version=self._newest,
            rollouts=total,
            scored=len(scored),
            mean_reward=math.fsum(scored) / len(scored) if scored else None,
            pass_at=pass_at(rewards, self.k),
            by_ending={ending: n for ending, n in sorted(self._endings.items()) if n},
            mean_tokens=self._tokens / self._launched if self._launched else 0.0,
            reason=f"{'all ' if self.complete else ''}{total} rollouts ended, {len(scored)} of them scored",
        )


def pass_at(rewards: Sequence[Sequence[float]], k: int) -> dict[int, float]:
    """Unbiased pass@j for j = 1, 2, 4, … up to k, over examples; empty when a reward is neither 0 nor 1.

    1 - C(n - c, j) / C(n, j) for an example with c of n right (Chen et al., arXiv:2107.03374). An example with
    fewer than j scored rollouts says nothing about j and is left out of that mean.
    """
    if not any(rewards) or any(reward not in (0.0, 1.0) for each in rewards for reward in each):
        return {}
    result: dict[int, float] = {}
    j = 1
    while j <= k:
        shares = [
            1.0 - math.comb(len(each) - round(sum(each)), j) / math.comb(len(each), j)
            for each in rewards
            if len(each) >= j
        ]
        if shares:
            result[j] = math.fsum(shares) / len(shares)
        j *= 2
    return result


def _score(rollout: Rollout) -> float | None:
    """The reward of a rollout that was scored: completed or truncated, with a finite number."""
    reward = rollout.reward
    ended_well = rollout.outcome.ending in ("completed", "truncated")
    return float(reward) if ended_well and reward is not None and math.isfinite(reward) else None
