"""An environment for whole runs that engines are fitted to: answers of the small policy that are longer than in any example."""

from __future__ import annotations

from typing import Any

from paceline.envs import EndlessTasks, SingleTurnEnv
from paceline.envs.builtin.draws import Draws, Split
from paceline.envs.builtin.reverse_text import ALPHABET

SHORTEST, LONGEST = 10, 20
"""Letters of a text."""


class LongTexts(SingleTurnEnv):
    """Reverse a text that is longer than the policy has learnt to: a letter for each that is in its place."""

    def tasks(self, split: Split) -> EndlessTasks:
        return EndlessTasks(lambda index: _text(index, split), f"long-texts/{split}")

    def prompt(self, data: Any) -> str:
        return f"Reverse: {data}"

    def score(self, data: Any, text: str) -> float:
        return sum(a == b for a, b in zip(text.strip(), reversed(data), strict=False)) / len(data)


def _text(index: int, split: Split) -> str:
    draws = Draws("long_texts", 0, split, index)
    letters = range(draws.between(SHORTEST, LONGEST))
    return "".join(ALPHABET[draws.below(len(ALPHABET))] for _ in letters)
