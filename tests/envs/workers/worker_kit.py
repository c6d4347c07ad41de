"""A run's inside around workers: the real rollout runner, a scripted engine, real processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cli.environments import environment_of
from paceline.config import EnvSection, GatewaySection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.events import SegmentEnded, TurnRequested
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.rollout import Rollout
from paceline.domain.task import TaskRef
from paceline.envs.protocol import Environment
from paceline.envs.surroundings import Ask, no_service
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.gateway import Gateway
from paceline.runtime.runner import RolloutRunner
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

TOKENIZER = byte_tokenizer()


class Engine:
    """Answers every request with `text`, after a moment."""

    def __init__(self, text: str = "hello", seconds: float = 0.0) -> None:
        self.info = EngineInfo("e0", None, None)
        self.text, self.seconds = text, seconds
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        ids = np.array([*TOKENIZER.encode(self.text), TOKENIZER.stop_ids[0]], np.int32)
        return GenerateReply(ids, np.full(len(ids), -0.5, np.float32), "stop", ((0, len(ids)),))

    async def abort(self, request_id: str) -> None: ...


class Gate:
    """Grants every turn at once, and counts them."""

    def __init__(self) -> None:
        self.granted = 0

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        self.granted += 1
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, "e0", 0))
        return granted

    def report(self, event: SegmentEnded) -> None: ...


class Inside:
    """Runs rollouts of one environment."""

    def __init__(
        self, environment: Environment, limits: Limits, engine: Engine, gateway: Gateway | None = None
    ) -> None:
        self.environment = environment
        self.engine = engine
        self.gate = Gate()
        shared = EnvRuntime(
            environment=environment,
            source=environment.tasks("train"),
            limits=limits,
            sampling=SamplingSection(max_tokens=64),
            bridge=Bridge(TOKENIZER),
        )
        clock = asyncio.get_running_loop().time
        self.runner = RolloutRunner(
            {("train", "env"): shared}, {"e0": engine}, self.gate, clock, gateway=gateway
        )

    @property
    def pool(self) -> Any:
        return self.environment.pool  # type: ignore[attr-defined]

    async def roll_out(self, member: int = 0, *, group: int = 0, attempt: int = 0, index: int = 0) -> Rollout:
        command = StartRollout(
            RolloutId(group, member, attempt),
            TaskRef("env", "train", index),
            7 + group,
            100 + member,
            "e0",
            0,
        )
        return await self.runner.run(command)

    async def when(self, happens: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not happens():  # noqa: ASYNC110 (what other processes do wakes nobody here)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def inside(
    logs: Path,
    env_id: str,
    args: dict[str, Any] | None = None,
    *,
    limits: dict[str, Any] | None = None,
    engine: Engine | None = None,
    ask: Ask = no_service,
    group_size: int = 4,
    section: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    **workers: Any,
) -> AsyncIterator[Inside]:
    """`workers` are those of the section; a process unless it says otherwise. `gateway`: its section; None for none."""
    made = EnvSection.model_validate(
        {
            "id": env_id if ":" in env_id or env_id == "reverse-text" else f"worker_envs:{env_id}",
            "name": "env",
            "args": args or {},
            "limits": limits or {},
            "group_size": group_size,
            "workers": {"type": "process", "start_s": 120} | workers,
            **(section or {}),
        }
    )
    environment = await environment_of(made, "train", logs=logs, ask=ask)
    door = None
    if gateway is not None:
        door = Gateway(GatewaySection.model_validate(gateway), TOKENIZER, "policy")
    try:
        yield Inside(environment, made.limits, engine or Engine(), door)
    finally:
        await environment.close()
        if door is not None:
            await door.close()
