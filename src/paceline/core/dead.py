"""Why groups bring nothing to train, by environment, and what to change: for the warning and for the end of the run.

A newcomer meets dead groups before anything else: a score that is constant, prompts longer than a sample may be, a
filter that removes everything. So the reason is gathered while the streak lasts, and told long before it ends the run.
"""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName

_MOST_TEXT: Final = 300
"""Characters of an example that are told: an error's text may be a page."""

_EQUAL: Final = 1e-12
"""Variance below which rewards are equal: that of equal ones is no exact nought."""

_ADVICE: Final = {
    "zero_signal": (
        "its tasks are too hard or too easy for the policy, or its score does not look at the answer: give partial "
        "rewards or other tasks, or raise group_size or sampling.temperature"
    ),
    "filtered": "loosen that filter in [filters], or let it only flag, with enforce = false",
    "gated": "loosen the gate that is named (env.gates), or give it other tasks",
    "overlong": "raise batch.seq_len (and what the engine takes), shorten the prompts, or lower sampling.max_tokens",
    "truncated": "raise the limit that is named, or let the environment score what is cut short (on_truncated)",
    "failed": "mend what the error names",
    "void": "its groups are scored whole (all_or_nothing): find out why members have no score",
    "stale": "raise max_staleness, or lower the lag: its rollouts take longer than the trainer",
    "cancelled": "see the causes of its cancelled rollouts in the journal",
}


def brief(text: str) -> str:
    """As much of somebody's error as a line can tell."""
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"


class _Death(msgspec.Struct):
    """Groups of one environment that died of one cause."""

    kind: str
    count: int = 0
    example: str = ""
    """What one verdict says."""
    is_flat: bool = True
    """Whether all rewards of each group were equal."""
    lowest: float = float("inf")
    highest: float = float("-inf")
    """Of the groups' mean rewards; no number at all while nobody voted."""

    def add(self, result: GroupResult, example: str) -> None:
        self.count += 1
        self.example = brief(example)
        self.is_flat = self.is_flat and (result.reward_variance or 0.0) < _EQUAL
        if result.reward_mean is not None:
            self.lowest = min(self.lowest, result.reward_mean)
            self.highest = max(self.highest, result.reward_mean)

    def told(self, env: EnvName) -> str:
        if self.kind == "zero_signal" and self.is_flat:
            rewards = f"{self.lowest:.3g}"
            rewards += f" to {self.highest:.3g}" if self.highest > self.lowest else ""
            why = f"all rewards of a group were equal ({rewards})"
        else:
            why = f"{self.kind.replace('_', ' ')}: {self.example}" if self.example else self.kind
        return f"env {env!r}, {self.count} groups, {why}; {_ADVICE.get(self.kind, 'see the journal')}"


class _Streak:
    """Dead groups of one environment, in a row."""

    def __init__(self, warn_at: int) -> None:
        self.count = 0
        self.warn_at = warn_at
        self.was_told = False
        self.deaths: dict[tuple[str, str], _Death] = {}
        """By kind, and by which filter, which failure, which limit."""

    def told(self, env: EnvName) -> str:
        ordered = sorted(self.deaths.values(), key=lambda death: -death.count)
        return "; ".join(death.told(env) for death in ordered)


class Deaths:
    """Streaks of dead groups, one an environment: in a mixed run, one that never trains hides behind the others."""

    def __init__(self, warn_at: int) -> None:
        """A streak is worth a warning at so many groups, and again whenever it has doubled."""
        self._warn_at = warn_at
        self._streaks: dict[EnvName, _Streak] = {}

    def end(self, env: EnvName) -> bool:
        """A group of it trains. Returns whether people had been told that none does."""
        streak = self._streaks.pop(env, None)
        return streak is not None and streak.was_told

    def add(self, env: EnvName, result: GroupResult, error: str | None) -> str | None:
        """Take note of a dead group; `error` is that of its processing, if that failed. Returns a warning if the
        environment's streak is worth one."""
        kind = result.dead or "cancelled"
        reasons = [v.reason for v in result.verdicts if v.fate == kind and v.reason]
        example = error or (reasons[-1] if reasons else "")
        streak = self._streaks.setdefault(env, _Streak(self._warn_at))
        streak.count += 1
        which = "" if kind == "overlong" else example.partition(":")[0]
        death = streak.deaths.setdefault((kind, which), _Death(kind))
        death.add(result, example)
        if streak.count < streak.warn_at:
            return None
        streak.warn_at, streak.was_told = 2 * streak.count, True
        return f"{streak.count} groups of env {env!r} in a row brought nothing to train: {streak.told(env)}"

    def count(self, env: EnvName) -> int:
        return self._streaks[env].count if env in self._streaks else 0

    def told(self) -> str:
        """Why, of all environments, those with the most dead groups first."""
        ordered = sorted(self._streaks.items(), key=lambda item: -item[1].count)
        return "; ".join(streak.told(env) for env, streak in ordered)
