"""Environments of the workers' benchmark; imported in the workers too."""

from __future__ import annotations

from typing import Any

from paceline.domain.task import Split
from paceline.envs import Context, EndlessTasks, MultiTurnEnv, Observation, SingleTurnEnv


class Short(SingleTurnEnv):
    """One short call."""

    blocking = False

    def tasks(self, split: Split) -> EndlessTasks:
        return EndlessTasks(lambda index: index, f"short/{split}")

    def prompt(self, data: Any) -> str:
        return "what is 3 + 5?"

    def score(self, data: Any, text: str) -> float:
        return float(text == "eight")


class Waits(MultiTurnEnv[int]):
    """Calls a tool that takes 4 to 36 seconds, over and over."""

    blocking = False

    def tasks(self, split: Split) -> EndlessTasks:
        return EndlessTasks(lambda index: index, f"waits/{split}")

    def start(self, data: Any, ctx: Context) -> tuple[int, str]:
        return 0, "begin"

    def step(self, state: int, text: str) -> Observation:
        return Observation("the tool says 4", state=state + 1)

    async def between(self, state: int, ctx: Context) -> None:
        await ctx.sleep(4.0 + 32.0 * float(ctx.rng.random()))
