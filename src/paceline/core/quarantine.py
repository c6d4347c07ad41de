"""Tasks that are not drawn any more, because none of their rollouts can ever be scored.

A broken sandbox image, an input that kills its worker, a reference answer that does not parse: such a task costs a group
of rollouts each time it is drawn, and where it kills workers, attempts of others as well. So when group after group of
one task fails whole, while the environment works for others in between, the task is passed over from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.domain.commands import NoteQuarantine
from paceline.domain.group import GroupResult
from paceline.domain.ids import EnvName
from paceline.domain.task import TaskRef


class Patience(NamedTuple):
    """What one environment's tasks may cost."""

    groups: int
    """Groups of a task, in a row, that must fail whole."""
    tasks: int
    """Tasks of the environment. Never more than half of them are held: then it is the environment that is broken."""


class _Strikes(NamedTuple):
    groups: int
    worked: int
    """Groups of the environment that had been scored by then."""


class Quarantine:
    """Of all environments that have patience with their tasks; one without draws each task as often as it says."""

    __slots__ = ("_held", "_patience", "_strikes", "_worked")

    def __init__(self, patience: Mapping[EnvName, Patience]) -> None:
        self._patience = dict(patience)
        self._held: dict[EnvName, set[int]] = {}
        self._strikes: dict[tuple[EnvName, int], _Strikes] = {}
        self._worked: dict[EnvName, int] = {}

    def holds(self, task: TaskRef) -> bool:
        """Whether a task is passed over."""
        held = self._held.get(task.env)
        return held is not None and task.index in held

    def closed(self, task: TaskRef, result: GroupResult) -> NoteQuarantine | None:
        """A group of a task was processed. Returns what to tell when that was one too many."""
        patience = self._patience.get(task.env)
        if patience is None:
            return None
        key = (task.env, task.index)
        fates = {verdict.fate for verdict in result.verdicts}
        if not fates:
            return None  # it was given up before one of its members had started
        if fates != {"failed"}:
            if fates - {"failed", "cancelled"}:  # `void` is of members that were scored
                self._worked[task.env] = self._worked.get(task.env, 0) + 1
                self._strikes.pop(key, None)
            return None
        before, worked = self._strikes.get(key), self._worked.get(task.env, 0)
        if worked <= (0 if before is None else before.worked):
            return None  # nothing of the environment has worked since: that says nothing of the task
        count = 1 if before is None else before.groups + 1
        self._strikes[key] = _Strikes(count, worked)
        if count < patience.groups or 2 * (len(self._held.get(task.env, ())) + 1) > patience.tasks:
            return None
        self.hold(task.env, task.index)
        return NoteQuarantine(
            task.env,
            task.index,
            f"task {task.index} of env {task.env!r} is not drawn any more: {count} groups in a row failed whole, last: "
            f"{result.verdicts[0].reason}",
        )

    def hold(self, env: EnvName, index: int) -> None:
        """Pass a task over from now on."""
        self._held.setdefault(env, set()).add(index)
        self._strikes.pop((env, index), None)

    def forget(self, env: EnvName) -> None:
        """Draw the tasks of an environment again that were passed over, with nothing held against them."""
        self._held.pop(env, None)
        self._strikes = {key: strikes for key, strikes in self._strikes.items() if key[0] != env}

    def snapshot(self) -> dict[str, Any]:
        """State to resume from."""
        return {
            "held": {env: sorted(held) for env, held in self._held.items()},
            "strikes": [[*key, *strikes] for key, strikes in self._strikes.items()],
            "worked": dict(self._worked),
        }

    def restore(self, state: Mapping[str, Any], env: EnvName) -> None:
        """Take back what a snapshot says of one environment, whose tasks are the same."""
        for index in state["held"].get(env, ()):
            self.hold(env, index)
        self._worked[env] = state["worked"].get(env, 0)
        for whose, index, *strikes in state["strikes"]:
            if whose == env:
                self._strikes[whose, index] = _Strikes(*strikes)
