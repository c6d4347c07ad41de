"""Reverse a short string: one turn, and partial credit for a reversal that is almost right."""

from __future__ import annotations

import msgspec

from paceline.envs.builtin.draws import Draws, Split, split_of

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 5, 8
"""Letters in a string."""


class ReverseTextTask(msgspec.Struct, frozen=True):
    text: str

    @property
    def answer(self) -> str:
        return self.text[::-1]


def make_task(seed: int, index: int, split: Split) -> ReverseTextTask:
    """Task `index` of the endless stream that `seed` and `split` name. No string is in both splits."""
    draws = Draws("reverse_text", seed, split, index)
    while True:
        length = draws.between(SHORTEST, LONGEST)
        text = "".join(ALPHABET[draws.below(len(ALPHABET))] for _ in range(length))
        if split_of(text) == split:
            return ReverseTextTask(text)


def prompt(task: ReverseTextTask) -> str:
    """What the user says."""
    return f"Reverse: {task.text}"


def parse_answer(response: str) -> str:
    """The answer in a response: all of it, less the white space around it."""
    return response.strip()


def score(task: ReverseTextTask, response: str) -> float:
    """1 for the reversal; less by the share of letters one would have to edit; 0 for nothing alike."""
    answer = parse_answer(response)
    return 1.0 - _edits(answer, task.answer) / max(len(answer), len(task.answer))


def _edits(a: str, b: str) -> int:
    """Letters to insert, delete or replace to make `b` of `a` (Levenshtein 1966)."""
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
        above = row
    return above[-1]
