"""Rows: the numbers of one optimizer step, of one eval epoch, or of this moment."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

RowKind: TypeAlias = Literal["step", "eval", "now"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one moment of a run, by name; `metrics` lists the names."""

    kind: RowKind
    at: float
    """Seconds of the run's clock."""
    segment: int = 0
    """Resumptions before it: after one, steps may come again, in a segment of their own."""
    step: int
    """The optimizer step; for an eval, the version it measured (step n makes vn)."""
    env: str = ""
    """The environment of an eval; empty otherwise."""
    values: dict[str, float]
    trained: bool = True
    """False for a step whose batch was shipped and never acknowledged: the run ended, or died, before."""

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What identifies it in a table of metrics. Rows of one key do not replace each other: a later one adds."""
        return (self.kind, self.segment, self.env, self.step)

    def flat(self) -> dict[str, Any]:
        """One JSON object."""
        head: dict[str, Any] = {"kind": self.kind, "segment": self.segment, "step": self.step, "at": self.at}
        if self.env:
            head["env"] = self.env
        if not self.trained:
            head["trained"] = False
        return head | self.values
