"""What runs inside `verifiers` on Paceline's behalf: a chat program that needs no process, and the way to the gateway.

Imported by the adapter alone, where `verifiers` is installed. `CHAT` is the harness's id there.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import aiohttp
import httpx
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from paceline.envs.endpoint import Endpoint

__all__ = ["ChatHarness", "ToGateway"]

CHAT: Final = "paceline_chat"

# A harness is found by the name of a top-level module, which one inside a package has not.
sys.modules[CHAT] = sys.modules[__name__]

_OVER: Final = ("rollout_truncated", "context_length_exceeded")
"""Codes of the gateway's refusals that end a conversation in good order: what there is, is scored."""


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
    """No options of its own."""


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A conversation with the task's tools, like verifiers' own `null`, in the worker's loop: that one starts a process,
    and installs packages, for each rollout."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
            tools, dispatch, servers = await self._tools(mcp_urls, stack)
            while True:
                asked = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                async with http.post(f"{endpoint}/chat/completions", json=asked) as response:
                    said = await response.text()
                if response.status == 400 and (
                    trace.stop_condition is not None or any(code in said for code in _OVER)
                ):
                    break
                if response.status != 200:
                    raise RuntimeError(f"a model call got {response.status}: {said[:500]}")
                message = json.loads(said)["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                calls = message.get("tool_calls") or ()
                if not calls:
                    break
                for call in calls:
                    content = await _called(call["function"], dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _tools(self, urls: dict[str, str], stack: AsyncExitStack) -> tuple[Any, Any, Any]:
        if not urls:
            return [], {}, {}
        timeout = self.config.tool_timeout
        named = {name: {"url": url, "timeout": timeout} for name, url in urls.items()}
        found: tuple[Any, Any, Any] = await connect_mcp({"mcpServers": named}, stack)
        return found


async def _called(function: dict[str, Any], dispatch: Any, servers: Any) -> Any:
    """What a tool says, or what is wrong with its call: told to the model."""
    name = function["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except json.JSONDecodeError as error:
        return f"error: invalid JSON in tool arguments ({error})"
    if not isinstance(arguments, dict):
        return "error: tool arguments must be a JSON object"
    return await call_mcp(servers, dispatch, name, arguments)


class ToGateway(httpx.AsyncBaseTransport):
    """Sends the model calls of each rollout to its own endpoint. verifiers names the rollout in a header, so that one
    client, with one pool of connections, serves them all."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        """By the id of a rollout's trace."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._inner = httpx.AsyncHTTPTransport(limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        endpoint = self.endpoints.get(request.headers.get(SESSION_ID_HEADER, ""))
        if endpoint is None:
            text = "no rollout is served under this session: it is over, or the route names none"
            return httpx.Response(401, json={"error": {"message": text, "code": "rollout_over"}})
        request.url = httpx.URL(endpoint.base_url + request.url.raw_path.decode())
        request.headers["host"] = request.url.netloc.decode()
        request.headers["authorization"] = f"Bearer {endpoint.secret}"
        request.headers["x-api-key"] = endpoint.secret
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()
