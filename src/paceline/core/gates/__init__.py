"""Whether a group that was processed may train, and whether its task is drawn again soon. One file an idea.

A sampler chooses what is drawn; a gate judges what came of it. All gates of an environment judge every group, and one that
refuses is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.gates.advantage import AdvantageRange
from paceline.core.gates.base import PASSES, Gate, Judgement, Outcome
from paceline.core.gates.reward import RewardBand
from paceline.core.gates.solved import SolvedRests
from paceline.errors import ConfigError

GATES: Mapping[str, type[Gate]] = {
    "advantage": AdvantageRange,
    "reward": RewardBand,
    "solved": SolvedRests,
}
"""Gates that come with Paceline."""


def build_gate(name: str, factory: type[Gate], size: int | None, seed: int, args: Mapping[str, Any]) -> Gate:
    """A gate of a source of `size` tasks, None for endless. ConfigError when an argument does not fit."""
    try:
        return factory(size, seed, **args)
    except TypeError as error:
        raise ConfigError(f"gate {name!r} refuses its args: {error}") from error


class Gates:
    """The gates of one environment, by name."""

    def __init__(self, gates: Mapping[str, Gate]) -> None:
        self._gates = gates

    def judge(self, outcome: Outcome) -> Judgement:
        """Of all of them: what the first says that refuses, and the longest rest."""
        said = {name: gate.judge(outcome) for name, gate in self._gates.items()}
        refusals: Sequence[str] = [f"gate {name}: {one.refuses}" for name, one in said.items() if one.refuses]
        return Judgement(
            refusals[0] if refusals else "", max([one.rests for one in said.values()], default=0)
        )

    def snapshot(self) -> dict[str, Any]:
        return {name: gate.snapshot() for name, gate in self._gates.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a snapshot; a gate that is new starts afresh."""
        for name, gate in self._gates.items():
            if name in state:
                gate.restore(state[name])


__all__ = [
    "GATES",
    "PASSES",
    "AdvantageRange",
    "Gate",
    "Gates",
    "Judgement",
    "Outcome",
    "RewardBand",
    "SolvedRests",
    "build_gate",
]
