"""Tasks: the problems of an environment."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from paceline.domain.ids import EnvName

Split: TypeAlias = Literal["train", "eval"]


class TaskRef(msgspec.Struct, frozen=True, gc=False):
    """A task by position. The core draws positions; the environment turns them into tasks."""

    env: EnvName
    split: Split
    index: int
    epoch: int = 0
    """How many times the source had been walked through when this was drawn."""


class Task(msgspec.Struct, frozen=True):
    """A task as its environment sees it."""

    ref: TaskRef
    data: Any
    """Whatever the environment put there: JSON-like for foreign environments, any object inline."""
