"""The record of a rollout that an earlier life of the run left under way, as its environment goes through it again.

    environment ── the same call ──▶ the recorded answer ─ … ─▶ the end: RolloutContinued ──▶ gate, engine
                └─ another call ───▶ the rest is left ────────▶ the same

See `docs/continuing.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.domain.commands import ContinueRollout
from paceline.domain.events import RolloutContinued
from paceline.domain.part import Asked, Part


class Record:
    """Gives out the parts of one rollout as long as its environment asks for the same."""

    def __init__(self, command: ContinueRollout, parts: Sequence[Part]) -> None:
        """`parts` follow each other from the rollout's beginning (`core.parts.whole_parts`)."""
        self._command = command
        self._parts = parts
        self._at = 0
        self.strayed = ""
        """How its environment did something else than it did then; empty while it has not."""

    def next(
        self, turn: int, before: int, after: int, prompt: NDArray[np.int32], asked: Asked
    ) -> Part | None:
        """What the request at this place sampled; None at the end of the record.

        `turn`, `before`, `after` and `prompt` are as in `Part`. What is asked for otherwise than it was leaves the rest.
        """
        if self._at == len(self._parts):
            return None
        part = self._parts[self._at]
        how = ""
        if part.turn != turn or part.before != before:
            how = f"its record goes on with turn {part.turn}, behind {part.before} tokens of it"
        elif not before and part.asked != asked:
            how = f"it is asked for with {asked}, and was with {part.asked}"
        elif not before and (part.after != after or not np.array_equal(part.prompt_ids, prompt)):
            how = _difference(part, after, prompt)
        if how:
            self.strayed = f"turn {turn} is not what it was: {how}"
            self._parts = self._parts[: self._at]
            return None
        self._at += 1
        return part

    def end(self, *, is_mid_turn: bool, turns: int) -> RolloutContinued:
        """What was taken of it and what was not, said once."""
        taken = self._parts[: self._at]
        tokens = sum([part.tokens for part in taken])
        lost = self._command.tokens - tokens
        why = self.strayed
        if lost and not why:
            is_over = self._at < len(self._parts)
            why = (
                "it ended before its record did" if is_over else "the end of its record had not been written"
            )
        versions = [version for part in taken for version, _ in part.versions]
        return RolloutContinued(
            self._command.rollout, tokens, lost, turns, is_mid_turn, min(versions, default=None), why
        )


def _difference(part: Part, after: int, prompt: NDArray[np.int32]) -> str:
    """In words: where its prompt differs from the recorded one."""
    was = part.prompt_ids
    if part.after != after:
        return f"its prompt goes on from turn {after}, and did from {part.after} (-1: from none)"
    common = min(len(was), len(prompt))
    differs = np.flatnonzero(was[:common] != prompt[:common])
    at = int(differs[0]) if len(differs) else common
    return f"its prompt has {len(prompt)} new tokens, had {len(was)}, and differs from token {at} on"
