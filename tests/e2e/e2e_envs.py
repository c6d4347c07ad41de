"""Environments that make trouble, imported by the runs under test."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from paceline.cli import report
from paceline.domain.task import Split, Task
from paceline.envs import Context, Environment, ListTasks, Model, Result, SingleTurnEnv


class Words(SingleTurnEnv):
    """Say the word: scored by how much of it comes back, so members of a group differ."""

    def __init__(self, tasks: int = 64, says: str = "") -> None:
        self._tasks, self._says = tasks, says

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([{"word": f"{n:03d}"} for n in range(self._tasks)])

    def prompt(self, data: Any) -> str:
        return f"reverse: {data['word']}{self._says}"

    def score(self, data: Any, text: str) -> float:
        return float(sum(map(ord, text)) % 7) / 7.0


class Witnessed(Words):
    """Tells a file outside of the run of each rollout that begins."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self._told = told

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        with open(self._told, "a", encoding="utf-8") as file:  # noqa: ASYNC230 - a line, at once
            file.write(f"{ctx.rollout}\n")
        return await super().rollout(task, model, ctx)


class Constant(Words):
    """Every answer earns the same."""

    def score(self, data: Any, text: str) -> float:
        return 1.0


class Raising(Words):
    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        raise ValueError(f"no sandbox for task {task.data['word']}")


class Stuck(Words):
    """Blocks a thread that nobody can interrupt, and holds on to its rollout when it is cancelled."""

    def score(self, data: Any, text: str) -> float:
        return 0.5

    blocking = True

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("reverse: ab")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await ctx.in_thread(time.sleep, 600)


class Lingering(Words):
    """After its first groups, rollouts that neither end nor stop before a file is there. They say so in a file beside it."""

    def __init__(self, until: str) -> None:
        super().__init__()
        self._until = Path(until)

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        if ctx.rollout.group < 12:
            return await super().rollout(task, model, ctx)
        self._until.with_suffix(".waits").touch()
        while not self._until.exists():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return await super().rollout(task, model, ctx)


class LongReport(Words):
    """Of a run whose report takes for ever."""

    def __init__(self) -> None:
        super().__init__()

        def make(_run_dir: Path) -> Path:
            while True:
                pass

        report.make_report = make


class Busy(Words):
    """Holds up the loop for ever, in code that never awaits."""

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        print("held up", file=sys.stderr, flush=True)
        while True:
            pass


class Failing(Stuck):
    """Ends the run while a rollout of its holds on."""

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("reverse: ab")
        if ctx.rollout.group % 2:
            raise ValueError("no sandbox")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)


class Intruder(Words):
    """Reaches for what is not its own."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self._does = does

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("reverse: ab")
        loop = asyncio.get_running_loop()
        match self._does:
            case "stop the loop":
                loop.stop()
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel everything":
                for each in asyncio.all_tasks():
                    each.cancel()
            case "cancel the shipper":
                for each in asyncio.all_tasks():
                    if each.get_name() == "batch shipper":
                        each.cancel()
            case "exit in a task":
                self._kept = asyncio.ensure_future(_leaves())
            case "leave a task":
                self._kept = asyncio.ensure_future(_stays())
            case "leave a thread":
                threading.Thread(target=time.sleep, args=(3600,), name="sleeper").start()
        await asyncio.sleep(0.1)
        return Result(reward=float(ctx.rollout.member % 2))


async def _leaves() -> None:
    sys.exit(3)


async def _stays() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


__all__ = ["Busy", "Constant", "Environment", "Failing", "Intruder", "Raising", "Stuck", "Words"]
