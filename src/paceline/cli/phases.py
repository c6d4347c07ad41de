"""What a run is doing before its first rollout, for whoever watches it start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

Say: TypeAlias = Callable[[str], None]


class Phases:
    """What a run is doing before its first rollout: engines and trainer start side by side."""

    def __init__(self, tell: Say) -> None:
        self._tell = tell
        self._under_way: list[str] = []

    def now(self, what: str) -> None:
        self._tell(what)

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Tell that `what` is going on, beside what else does."""
        self._under_way.append(what)
        self._tell(", ".join(self._under_way))
        try:
            yield
        finally:
            self._under_way.remove(what)
            if self._under_way:
                self._tell(", ".join(self._under_way))
