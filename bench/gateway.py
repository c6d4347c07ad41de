"""What exactness costs: a turn through recorder and bridge at long contexts, and a call through the gateway.

The gateway is measured in CPU time of its process: HTTP server, JSON, the conversation tree, bridge, recorder, turn
and answer. The engine answers from memory, and the program that asks is a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import GatewaySection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.task import TaskRef
from paceline.envs.protocol import Environment
from paceline.envs.recorder import Recorder
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.gateway import Gateway
from paceline.runtime.impossible import ImpossibleWatch
from paceline.runtime.model import ModelCalls
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge, Conversation, tool, user

ROWS = ("gateway_ms_per_call", "gateway_ms_per_call_32k", "turns_per_s_32k", "turn_growth_32k")

SESSIONS, TURNS, SAID, SEEN = 16, 24, 128, 256
LONG = 32_768
TARGET_MS, TARGET_GROWTH = 1.0, 1.3


def rows() -> list[dict[str, Any]]:
    """The benchmark's rows: name, value, unit, target, ok, note."""
    short = min(bridge_us(1024) for _ in range(3))
    long = min(bridge_us(LONG) for _ in range(3))
    short_ms, long_ms = asyncio.run(_gateway())
    shape = f"{SEEN} tokens seen and {SAID} sampled in a turn"
    return [
        _row(
            "gateway_ms_per_call",
            short_ms,
            "ms CPU",
            TARGET_MS,
            f"chat completions, {SESSIONS} rollouts of {TURNS} turns, {shape}: histories grow to "
            f"{TURNS * (SAID + SEEN)} tokens",
        ),
        _row(
            "gateway_ms_per_call_32k",
            long_ms,
            "ms CPU",
            None,
            f"the same behind histories of {LONG} tokens, which each request carries whole",
        ),
        _row(
            "turns_per_s_32k", 1e6 / long, "turns/s", None, f"recorder and bridge at {LONG} tokens, {shape}"
        ),
        _row("turn_growth_32k", long / short, "x", TARGET_GROWTH, f"a turn at {LONG} tokens ÷ one at 1024"),
    ]


def _row(name: str, value: float, unit: str, target: float | None, note: str) -> dict[str, Any]:
    ok = None if target is None else value <= target
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target, "ok": ok, "note": note}


# ── recorder and bridge ──


def bridge_us(context: int, turns: int = 400) -> float:
    """CPU µs of a turn at `context` tokens; every observation is new, so that no cache answers."""
    tokenizer = byte_tokenizer()
    bridge, recorder = Bridge(tokenizer), Recorder()
    conversation = Conversation(bridge)
    end = tokenizer.stop_ids[0]
    sampled = np.array([*tokenizer.encode("s" * (SAID - 1)), end], np.int32)
    logprobs = np.full(SAID, -0.5, np.float32)
    text = tokenizer.decode(sampled[:-1])

    def turn(said: dict[str, Any]) -> None:
        plan = conversation.plan([said])
        ids = bridge.encode(plan)
        if plan.base is None:
            recorder.prompt(ids, plan.roles)
        else:
            recorder.extend(ids, plan.base.turn, plan.roles)
        _ = recorder.context
        recorder.segment(sampled, logprobs, ((0, SAID),), 0)
        recorder.commit("stop", engine="e", queued_s=0, started=0, ended=0, segments=1)
        node = conversation.commit(plan, sampled, end, text)
        node.turn = len(recorder.turns) - 1

    turn(user("q" * context))
    turn(tool("warm"))
    began = time.process_time()
    for number in range(turns):
        turn(tool(f"{number:06d}" + "o" * (SEEN - 6)))
    return (time.process_time() - began) / turns * 1e6


# ── the gateway ──


class _Gate:
    def request(self, event: Any) -> asyncio.Future[GrantTurn]:
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, "e", 0))
        return granted

    def report(self, event: Any) -> None:
        pass


class _Engine:
    def __init__(self, sampled: Any) -> None:
        self.info = EngineInfo("e", None, None)
        self._reply = GenerateReply(
            sampled, np.full(len(sampled), -0.5, np.float32), "stop", ((0, len(sampled)),)
        )

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return self._reply


async def _gateway() -> tuple[float, float]:
    tokenizer = byte_tokenizer()
    gateway = Gateway(GatewaySection(), tokenizer, "policy")
    sampled = np.array([*tokenizer.encode("s" * (SAID - 1)), tokenizer.stop_ids[0]], np.int32)
    engine: Any = _Engine(sampled)
    source: Any = None
    shared = EnvRuntime(Environment(), source, Limits(), SamplingSection(), Bridge(tokenizer))
    numbers = iter(range(10**6))
    impossible = ImpossibleWatch(print)

    async def measure(programs: _Programs, opening: int, sessions: int, turns: int) -> float:
        """CPU ms a call."""
        endpoints: list[tuple[str, str]] = []
        async with asyncio.TaskGroup() as tasks:
            ready, done = asyncio.Barrier(sessions + 1), asyncio.Barrier(sessions + 1)

            async def serve() -> None:
                command = StartRollout(RolloutId(next(numbers), 0), TaskRef("e", "train", 0), 0, 1, "e", 0)
                calls = ModelCalls(
                    command,
                    shared,
                    {"e": engine},
                    _Gate(),
                    asyncio.get_running_loop().time,
                    noise_by_position=True,
                    gateway=gateway,
                    impossible=impossible,
                )
                async with calls.serve() as endpoint:
                    endpoints.append((endpoint.openai_url, endpoint.secret))
                    await ready.wait()
                    await done.wait()
                assert len(calls.recorder.turns) == turns
                assert all(turn.extends for turn in calls.recorder.turns[1:])

            for _ in range(sessions):
                tasks.create_task(serve())
            await ready.wait()
            began = time.process_time()
            await programs.run(endpoints, opening, turns)
            spent = time.process_time() - began
            await done.wait()
        return spent / (sessions * turns) * 1e3

    try:
        async with _Programs() as programs:
            await measure(programs, 64, 4, 4)
            gc.collect()
            short = min([await measure(programs, 64, SESSIONS, TURNS) for _ in range(3)])
            long = min([await measure(programs, LONG, 4, TURNS) for _ in range(3)])
    finally:
        await gateway.close()
    return short, long


class _Programs:
    """The programs, in a process of their own that is warm before the clock runs."""

    async def __aenter__(self) -> _Programs:
        script = str(Path(__file__).with_name("_gateway_program.py"))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def run(self, endpoints: list[tuple[str, str]], opening: int, turns: int) -> None:
        job = {"endpoints": endpoints, "opening": opening, "turns": turns, "seen": SEEN}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        assert await self._process.stdout.readline() == b"done\n", "the programs failed"


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
