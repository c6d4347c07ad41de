"""Sums over the rollouts of one window, from which a step's rates and means are made."""

from __future__ import annotations

from paceline.domain.group import GroupResult
from paceline.domain.sample import Sample
from paceline.observe.lives import Life


class Window:
    """One environment's sums; `add` puts several environments together."""

    __slots__ = (
        "by_ending", "by_fate", "env_s", "flags", "gate_s", "gated", "groups", "groups_voted", "groups_zero", "model_s",
        "parts", "reward", "rollouts", "samples", "samples_cut", "samples_generated", "samples_trained", "scored",
        "shipped", "shipped_reward", "shipped_scored", "shipped_tokens", "tokens", "trainable", "turns",
        "unscored_parts", "variance",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rollouts = self.scored = self.tokens = self.turns = 0
        self.reward = self.model_s = self.gate_s = self.env_s = 0.0
        self.parts: dict[str, float] = {}
        """Of scored rollouts."""
        self.unscored_parts: dict[str, float] = {}
        """Of the others: part of the sums over all."""
        self.by_ending: dict[str, int] = {}
        self.by_fate: dict[str, int] = {}
        self.flags: dict[str, int] = {}
        self.gated: dict[str, int] = {}
        """Rollouts of groups that a gate refused."""
        self.groups = self.groups_zero = self.groups_voted = 0
        self.variance = 0.0
        self.shipped = self.shipped_scored = self.shipped_tokens = self.trainable = 0
        self.shipped_reward = 0.0
        self.samples = self.samples_cut = self.samples_generated = self.samples_trained = 0

    def finalised(self, life: Life) -> None:
        self.rollouts += 1
        self.tokens += life.tokens
        self.turns += life.turns
        self.model_s += life.model_s
        self.gate_s += life.gate_s
        self.env_s += life.env_s
        _count(self.by_ending, life.ending or "failed")
        _count(self.by_fate, life.fate or "failed")
        for flag in life.flags:
            _count(self.flags, flag)
        parts = self.unscored_parts
        if life.reward is not None:
            self.scored += 1
            self.reward += life.reward
            parts = self.parts
        for name, value in life.rewards.items():
            parts[name] = parts.get(name, 0.0) + value

    def group(self, result: GroupResult) -> None:
        self.groups += 1
        self.groups_zero += result.dead == "zero_signal"
        if result.reward_variance is not None:
            self.groups_voted += 1
            self.variance += result.reward_variance

    def refuse(self, life: Life) -> None:
        _count(self.gated, life.refused_by)

    def ship(self, life: Life) -> None:
        self.shipped += 1
        self.shipped_tokens += life.tokens
        self.trainable += bool(life.advantage)
        if life.reward is not None:
            self.shipped_scored += 1
            self.shipped_reward += life.reward

    def sample(self, sample: Sample) -> None:
        trained = sample.trainable_tokens
        self.samples += 1
        self.samples_cut += sample.cut_tokens > 0
        self.samples_trained += trained
        self.samples_generated += trained + sample.cut_tokens

    def add(self, other: Window) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, name, mine + theirs)

    def values(self, flags: list[str], gates: list[str]) -> dict[str, float]:
        """Rates and means by name; what has no denominator is left out. `flags`, `gates`: every filter, and every gate that
        refused, known so far."""
        values: dict[str, float] = {
            "rollouts": self.rollouts,
            "shipped": self.shipped,
            "groups": self.groups,
        }
        if n := self.rollouts:
            values |= {
                "reward_all": self.reward / n,
                "length": self.tokens / n,
                "turns": self.turns / n,
                "model_s": self.model_s / n,
                "gate_s": self.gate_s / n,
                "env_s": self.env_s / n,
                "filtered": self.by_fate.get("filtered", 0) / n,
                "zero_signal": self.by_fate.get("zero_signal", 0) / n,
            }
            for ending in ("completed", "truncated", "failed", "cancelled"):
                values[ending] = self.by_ending.get(ending, 0) / n
            for flag in flags:
                values[f"flagged/{flag}"] = self.flags.get(flag, 0) / n
            if gates:
                values["gated"] = sum(self.gated.values()) / n
            for gate in gates:
                values[f"gated/{gate}"] = self.gated.get(gate, 0) / n
            for part in {**self.parts, **self.unscored_parts}:
                total = self.parts.get(part, 0.0) + self.unscored_parts.get(part, 0.0)
                values[f"rewards_all/{part}"] = total / n
        if n := self.scored:
            values["reward"] = self.reward / n
            for part, total in self.parts.items():
                values[f"rewards/{part}"] = total / n
        if n := self.groups:
            values["groups_zero_signal"] = self.groups_zero / n
        if n := self.groups_voted:
            values["group_variance"] = self.variance / n
        if n := self.shipped:
            values["trainable"] = self.trainable / n
            values["length_shipped"] = self.shipped_tokens / n
        if n := self.shipped_scored:
            values["reward_shipped"] = self.shipped_reward / n
        if n := self.samples:
            values["sample_generated"] = self.samples_generated / n
            values["sample_trained"] = self.samples_trained / n
            values["sample_cut"] = self.samples_cut / n
        return values


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
