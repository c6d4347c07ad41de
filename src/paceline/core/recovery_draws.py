"""What has been drawn of each environment, as a journal tells of it: a part of `recovery`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.quarantine import Quarantine
from paceline.domain import commands as do
from paceline.domain.ids import EnvName
from paceline.domain.task import TaskRef


class RecoveredDraws:
    """The curriculum of the core, but for what it decides."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """`state`: the curriculum of a checkpoint."""
        self._saved = state
        self._draws: int = state["draws"]
        self._envs: dict[EnvName, dict[str, Any]] = {
            env: {**saved, "redraw": [tuple(task) for task in saved["redraw"]]}
            for env, saved in state["envs"].items()
        }
        self._quarantine = Quarantine({})
        if (quarantine := state.get("quarantine")) is not None:
            for env in {*self._envs, *quarantine["held"], *quarantine["worked"]}:
                self._quarantine.restore(quarantine, env)

    def drawn(self, task: TaskRef) -> None:
        """A group was opened for it."""
        self._draws += self._came_next(task)

    def skipped(self, command: do.SkipTask) -> None:
        self._came_next(command.task)

    def again(self, task: TaskRef) -> None:
        """It is to be drawn once more."""
        self._of(task.env)["redraw"].append((task.index, task.epoch))

    def quarantined(self, command: do.NoteQuarantine) -> None:
        self._quarantine.hold(command.env, command.index)
        saved = self._of(command.env)
        saved["redraw"] = [task for task in saved["redraw"] if task[0] != command.index]

    def forgive(self, envs: Iterable[EnvName]) -> None:
        for env in envs:
            self._quarantine.forget(env)

    def plain(self) -> dict[str, Any]:
        return {
            **self._saved,
            "draws": self._draws,
            "envs": self._envs,
            "quarantine": self._quarantine.snapshot(),
        }

    def _of(self, env: EnvName) -> dict[str, Any]:
        return self._envs.setdefault(env, {"drawn": 0, "fingerprint": None, "redraw": []})

    def _came_next(self, task: TaskRef) -> bool:
        """Take a task off what its environment has to give; whether it is a fresh one, and not drawn again."""
        saved = self._of(task.env)
        drawn = (task.index, task.epoch)
        if drawn in saved["redraw"]:
            saved["redraw"].remove(drawn)
            return False
        saved["drawn"] += 1
        return True
