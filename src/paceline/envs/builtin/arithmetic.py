"""Add or subtract two small numbers: one turn, and an answer that is right or wrong."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from paceline.envs.builtin.draws import Draws, Split, split_of

LARGEST = 20
"""Largest operand. Differences are never negative."""

FORMAT_CREDIT = 0.1
"""Score of a response that is a number, but not the right one."""

_NUMBER = re.compile(r"-?[0-9]{1,9}")


class ArithmeticTask(msgspec.Struct, frozen=True):
    left: int
    operator: Literal["+", "-"]
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right


def make_task(seed: int, index: int, split: Split) -> ArithmeticTask:
    """Task `index` of the endless stream that `seed` and `split` name. No problem is in both splits."""
    draws = Draws("arithmetic", seed, split, index)
    while True:
        left, right = draws.between(0, LARGEST), draws.between(0, LARGEST)
        task = (
            ArithmeticTask(left, "+", right)
            if draws.below(2)
            else ArithmeticTask(max(left, right), "-", min(left, right))
        )
        if split_of(_formula(task)) == split:
            return task


def prompt(task: ArithmeticTask) -> str:
    """What the user says."""
    return f"Compute: {_formula(task)}"


def parse_answer(response: str) -> int | None:
    """The number a response consists of; None if it is anything else."""
    stripped = response.strip()
    return int(stripped) if _NUMBER.fullmatch(stripped) else None


def score(task: ArithmeticTask, response: str) -> float:
    """1 for the right number, FORMAT_CREDIT for a wrong one, 0 for anything else."""
    answer = parse_answer(response)
    if answer is None:
        return 0.0
    return 1.0 if answer == task.answer else FORMAT_CREDIT


def _formula(task: ArithmeticTask) -> str:
    return f"{task.left}{task.operator}{task.right}"
