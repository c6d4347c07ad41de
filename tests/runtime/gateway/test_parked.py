"""A program whose rollout is parked sees a slow answer, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gateway_kit import Client, Serves
from test_streaming import LONG, TOKENIZER, pieces

from paceline.config import GatewaySection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.ids import RolloutId
from paceline.domain.load import EngineInfo
from paceline.domain.task import TaskRef
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.gateway import Gateway
from paceline.runtime.runner import RolloutRunner
from paceline.tokens import Bridge

ROLLOUT = RolloutId(0, 0)
IDS = [*TOKENIZER.encode(LONG).tolist(), TOKENIZER.stop_ids[0]]
AT_ONCE = 9
"""Tokens that the engine samples until the rollout is parked."""


class Gate:
    """Grants the first turn, and each later one when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[GrantTurn]] = []
        self.asked = asyncio.Event()

    def request(self, event: Any) -> asyncio.Future[GrantTurn]:
        self.waiting.append(asyncio.get_running_loop().create_future())
        if len(self.waiting) == 1:
            self.grant()
        else:
            self.asked.set()
        return self.waiting[-1]

    def grant(self) -> None:
        self.waiting[-1].set_result(GrantTurn(ROLLOUT, "e0", 0))

    def report(self, event: Any) -> None: ...


class Engine:
    """Goes on from what its prompt ends with; the first request goes no further than AT_ONCE until it is aborted."""

    info = EngineInfo("e0", None, None)

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.has_sampled, self.aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        first = not self.prompts
        self.prompts.append(request.token_ids.tolist())
        ids = IDS[:AT_ONCE] if first else IDS[AT_ONCE:]
        if request.tell is not None:
            request.tell(ids)
        if first:
            self.has_sampled.set()
            await self.aborted.wait()
        logprobs = np.full(len(ids), -0.5, np.float32)
        return GenerateReply(
            np.array(ids, np.int32), logprobs, "abort" if first else "stop", ((0, len(ids)),)
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.set()


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_parked_is_answered_whole_once_its_turn_has_come_again(streams: bool) -> None:
    found: list[str] = []

    async def program(client: Client) -> None:
        asked = {"role": "user", "content": "q"}
        if streams:
            found.extend(await pieces(client, "/v1/chat/completions", {"messages": [asked]}))
        else:
            found.append((await client.chat(asked))["choices"][0]["message"]["content"])

    async def main() -> None:
        gateway, env, gate, engine = (
            Gateway(GatewaySection(), TOKENIZER, "policy"),
            Serves(program),
            Gate(),
            Engine(),
        )
        shared = EnvRuntime(env, env.tasks("train"), Limits(), SamplingSection(), Bridge(TOKENIZER))
        clock = asyncio.get_running_loop().time
        runner = RolloutRunner({("train", "env"): shared}, {"e0": engine}, gate, clock, gateway=gateway)  # type: ignore[arg-type, dict-item]
        try:
            command = StartRollout(ROLLOUT, TaskRef("env", "train", 0), 7, 8, "e0", 0)
            running = asyncio.create_task(runner.run(command))
            await engine.has_sampled.wait()
            runner.park(ROLLOUT)
            await gate.asked.wait()  # it has stopped, and stands in line
            assert len(engine.prompts) == 1
            assert "".join(found) != LONG
            gate.grant()
            rollout = await running
        finally:
            await gateway.close()
        assert rollout.outcome.ending == "completed", rollout.outcome
        (turn,) = rollout.turns
        assert (turn.sampled_ids.tolist(), turn.segments) == (IDS, 2)
        assert engine.prompts[1] == engine.prompts[0] + IDS[:AT_ONCE]

    asyncio.run(main())
    assert "".join(found) == LONG
