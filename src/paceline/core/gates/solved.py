"""Tasks that are solved rest: drawing them costs rollouts that bring no signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.gates.base import PASSES, Gate, Judgement, Outcome
from paceline.errors import ConfigError


class SolvedRests(Gate):
    """A task whose groups reach a mean reward of `at_least`, `times` in a row, is passed over for `epochs` epochs' worth
    of draws; then it is tried again, since a policy forgets. Refuses nothing."""

    def __init__(
        self, size: int | None, seed: int, *, at_least: float = 1.0, times: int = 2, epochs: float = 4.0
    ) -> None:
        if size is None:
            raise ConfigError(
                "gate 'solved' remembers tasks, and those of an endless source do not come again: leave it out"
            )
        if times < 1 or epochs <= 0:
            raise ConfigError(f"a gate with times = {times} and epochs = {epochs}: at least 1, and above 0")
        self._at_least, self._times = at_least, times
        self._rests = max(1, round(epochs * size))
        self._solved: dict[int, int] = {}
        """Times in a row, of tasks that were solved the last time."""

    def judge(self, outcome: Outcome) -> Judgement:
        if outcome.reward_mean is None:
            return PASSES
        if outcome.reward_mean < self._at_least:
            self._solved.pop(outcome.task, None)
            return PASSES
        times = self._solved.get(outcome.task, 0) + 1
        if times < self._times:
            self._solved[outcome.task] = times
            return PASSES
        self._solved.pop(outcome.task, None)
        return Judgement(rests=self._rests)

    def snapshot(self) -> Mapping[str, Any]:
        return {"solved": [[task, times] for task, times in self._solved.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._solved = {task: times for task, times in state["solved"]}
