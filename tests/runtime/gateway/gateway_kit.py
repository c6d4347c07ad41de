"""A rollout that serves a program, the program being a coroutine of the test that speaks HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from paceline.domain.rollout import Rollout
from paceline.domain.task import Split
from paceline.envs import Context, Environment, ListTasks, Result
from paceline.envs.endpoint import Endpoint
from paceline.testing import play
from paceline.testing.tokens import byte_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}

Program = Callable[["Client"], Awaitable[Any]]


class Client:
    """Speaks to the gateway as a program would."""

    def __init__(self, endpoint: Endpoint, http: aiohttp.ClientSession) -> None:
        self.endpoint, self.http = endpoint, http

    async def post(
        self, path: str, body: Any, *, secret: str | None = None, base: str | None = None, **headers: str
    ) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers)."""
        sent = {"Authorization": f"Bearer {secret or self.endpoint.secret}", **headers}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = (base or self.endpoint.base_url) + path
        async with self.http.post(url, data=data, headers=sent) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    async def chat(self, *messages: Any, **more: Any) -> Any:
        status, said, _ = await self.post("/v1/chat/completions", {"messages": messages, **more})
        assert status == 200, said
        return said

    async def events(self, path: str, body: Any) -> list[tuple[str | None, Any]]:
        """Server-sent events: (name, data)."""
        status, text, headers = await self.post(path, {**body, "stream": True})
        assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/event-stream")
        found = []
        for block in text.strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if "data" in lines:
                data = lines["data"]
                found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
        return found


class Serves(Environment):
    def __init__(self, program: Program) -> None:
        self.program = program

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([{}])

    async def rollout(self, task: Any, model: Any, ctx: Context) -> Result:
        timeout = aiohttp.ClientTimeout(total=20)
        async with model.serve() as endpoint, aiohttp.ClientSession(timeout=timeout) as http:
            await self.program(Client(endpoint, http))
        return Result(reward=1.0)

    async def on_truncated(self, task: Any, model: Any, ctx: Context, limit: Any) -> Result:
        return Result(reward=0.5)


def serve(program: Program, answers: Any, *, check: bool = True, **more: Any) -> Rollout:
    """The rollout in which `program` ran; an assertion that fails in it fails the test."""
    raised: list[BaseException] = []

    async def watched(client: Client) -> None:
        try:
            await program(client)
        except AssertionError as error:
            raised.append(error)

    rollout = play(
        Serves(watched), answers, serve=True, tokenizer=byte_tokenizer(TEMPLATE), max_tokens=128, **more
    )
    if raised:
        raise raised[0]
    if check:
        assert rollout.outcome.ending == "completed", rollout.outcome
    return rollout


async def settled() -> None:
    """Let what is under way go on."""
    for _ in range(20):
        await asyncio.sleep(0.005)
