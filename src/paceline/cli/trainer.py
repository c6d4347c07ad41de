"""`paceline trainer`: the reference trainer on a run directory, as a process of its own."""

from __future__ import annotations

from paceline.trainer.loop import add_arguments, run

__all__ = ["add_arguments", "run"]
