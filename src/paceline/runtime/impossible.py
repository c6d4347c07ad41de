"""How many of an engine's sampled tokens had logprobs that cannot be any; an alert when it is more than one in a hundred.

A reply with one fails its rollout, whose record names place and value. Now and then that is a bad memory cell; often, it is
a model that has diverged or a kernel that computes wrongly, and the run trains on what little passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paceline.domain.ids import EngineId
from paceline.errors import ImpossibleLogprobs

MOST: Final = 0.01
WINDOW: Final = 100_000
"""Tokens after which what was before counts by half."""


class ImpossibleWatch:
    """Of all engines of a run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._seen: dict[EngineId, list[int]] = {}
        """Tokens, and those of them with an impossible logprob."""
        self._told: set[EngineId] = set()

    def sampled(self, engine: EngineId, tokens: int) -> None:
        """A sound reply."""
        seen = self._seen.get(engine)
        if seen is None:
            seen = self._seen[engine] = [0, 0]
        seen[0] += tokens
        if seen[0] > WINDOW:
            seen[:] = seen[0] // 2, seen[1] // 2
        if engine in self._told and seen[1] <= MOST / 2 * seen[0]:
            self._told.discard(engine)

    def refused(self, engine: EngineId, error: ImpossibleLogprobs) -> None:
        """A reply that was not."""
        self.sampled(engine, error.tokens)
        seen = self._seen[engine]
        seen[1] += error.bad
        if seen[1] > MOST * seen[0] and engine not in self._told:
            self._told.add(engine)
            self._tell(
                f"{seen[1]} of about {seen[0]} tokens of engine {engine} had logprobs that cannot be any, more than "
                f"{MOST:.0%}; their rollouts failed. Look whether the policy has diverged, or that engine computes "
                f"wrongly; the latest: {error}"
            )
