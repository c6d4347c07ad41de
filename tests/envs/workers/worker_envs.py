"""Environments for worker tests. Imported in the workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paceline.domain.task import Split
from paceline.envs import (
    Context,
    Environment,
    InfrastructureError,
    ListTasks,
    Model,
    ProgramEnv,
    ProgramRun,
    Result,
    SingleTurnEnv,
)


class Echo(SingleTurnEnv):
    """One turn: the reward is the length of the answer."""

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([f"task {n}" for n in range(10)])

    def prompt(self, data: Any) -> str:
        return f"say {data}"

    def score(self, data: Any, text: str) -> Result:
        return Result(float(len(text)), metrics={"pid": float(os.getpid())}, info={"data": data})


class Told(Environment):
    """Does what its args say."""

    def __init__(self, does: str = "answer", seconds: float = 0.0) -> None:
        self.does = does
        self.seconds = seconds
        self.arrived = 0
        self.are_all_here = asyncio.Event()

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["one", "two"])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        ctx.state = 0.25
        reply = await model.chat(f"{task.data} {ctx.group_rng.integers(1000)}")
        if self.does == "kill" or (self.does == "kill once" and ctx.rollout.attempt == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.does == "block":
            time.sleep(self.seconds)  # noqa: ASYNC251 (what it is there for)
        elif self.does == "wait":
            await asyncio.sleep(self.seconds)
        elif self.does == "all at once":
            await self.all_here()
        elif self.does == "stubborn":
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(0.3)
                raise
        elif self.does == "raise":
            raise ValueError("no such thing")
        elif self.does == "raise half a character":
            raise ValueError("no file \udcff")
        elif self.does == "return too much":
            return Result(10**30)
        elif self.does == "infrastructure":
            raise InfrastructureError("sandbox lost")
        elif self.does == "cancel itself":
            raise asyncio.CancelledError
        elif self.does == "leak":
            self.kept = [*getattr(self, "kept", []), bytearray(60 << 20)]
        elif self.does == "allocate":
            bytearray(2 << 30)
        elif self.does == "talk":
            for n in range(100):
                await model.chat(f"and {n}")
        elif self.does == "cold":
            async with self.cold_start():
                began = time.monotonic()  # of the machine, and so the same for all workers
                await asyncio.sleep(self.seconds)
            return Result(1.0, info={"began": began})
        elif self.does == "the last takes the worker along":
            await self.all_here()
            if ctx.rollout.member == self.seconds - 1:
                await asyncio.sleep(0.5)  # the first has ended, and that has been said
                os.kill(os.getpid(), signal.SIGKILL)
            elif ctx.rollout.member:
                await asyncio.sleep(600)
        elif self.does == "cold kill":
            async with self.cold_start():
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.does == "ask":
            return Result(float(await self.ask("judge", {"text": reply.text})))
        return Result(1.0, info={"pid": os.getpid(), "last": reply.text})

    async def all_here(self) -> None:
        """Wait until `seconds` rollouts are here."""
        self.arrived += 1
        if self.arrived >= self.seconds:
            self.are_all_here.set()
        await self.are_all_here.wait()

    async def on_truncated(self, task: Any, model: Model, ctx: Context, limit: Any) -> Result | None:
        assert model.last is not None
        return Result(ctx.state, info={"last": model.last.text})


PROGRAM = """
import json, os, subprocess, sys, time, urllib.request

def ask(*messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "any", "messages": messages}).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

task, pids = sys.argv[1:]
opening = {"role": "user", "content": task}
first = ask(opening)
second = ask(opening, first, {"role": "user", "content": "again"})
open("answer", "w").write(first["content"] + second["content"])
if pids:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(pids, "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


class Program(ProgramEnv):
    """A program that asks twice; with `pids`, it leaves its own and a child's there, and stays."""

    def __init__(self, pids: str = "") -> None:
        super().__init__()
        self.pids = pids

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([f"task {n}" for n in range(10)])

    def command(self, data: Any, folder: Path) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", PROGRAM, data, self.pids]

    def score(self, data: Any, run: ProgramRun) -> Result:
        said = (run.folder / "answer").read_text() if run.exit_code in (0, None) else ""
        last = run.last.text if run.last is not None else ""
        return Result(float(len(said)), info={"last": last, "output": run.output})


class Large(Environment):
    """Says, or returns, more than is taken in its test."""

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["say", "return"])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        if task.data == "say":
            await model.chat("x" * 3000)
        return Result(1.0, info={"text": "x" * 3000})


class Broken(Environment):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("the licence server is down")


class Dies(Environment):
    """Takes its process with it while it is made."""

    def __init__(self) -> None:
        os._exit(7)
