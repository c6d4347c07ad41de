"""OpenEnv's environments, by their wire: a WebSocket of JSON messages. Needs none of OpenEnv's packages.

[[env]]
id = "openenv"
args = { url = "ws://localhost:8000/ws", action = "message" }

{"type": "reset", "data": {"seed": 1}}        ──▶
{"type": "step", "data": {"message": "..."}}  ──▶
                                              ◀── {"type": "observation", "data": {"observation", "reward", "done"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.protocol import (
    Context,
    EndlessTasks,
    Environment,
    InfrastructureError,
    Model,
    Result,
    TaskSource,
)
from paceline.errors import EnvError

_MOST_BYTES = 16 * 2**20


class OpenEnv(Environment):
    """One session of the server is one rollout; the reward is the sum over its steps."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        system_prompt: str | None = None,
        json_actions: bool = False,
        seeds: bool = True,
        extra: Mapping[str, Any] = {},
        connect_s: float = 30.0,
    ) -> None:
        """`action`: the field of an action that takes what the model says; with `json_actions` what it says is the
        action, as JSON. `observation`: the field of an observation that is said to the model; none says all of it, as
        JSON. `seeds`: reset with a seed that the members of a group share. `extra`: more fields of every action."""
        self._url = url
        self._action, self._observation = action, observation
        self._system_prompt = system_prompt
        self._json, self._seeds, self._extra = json_actions, seeds, dict(extra)
        self._connect_s = connect_s
        self._http: aiohttp.ClientSession | None = None

    def tasks(self, split: Split) -> TaskSource:
        offset = 0 if split == "train" else 1_000_003
        return EndlessTasks(lambda index: offset + index, f"openenv/{self._url}/{split}")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        ctx.state = played = {"reward": 0.0, "steps": 0}
        try:
            async with self._session().ws_connect(self._url, max_msg_size=_MOST_BYTES) as socket:
                seed = {"seed": (task.data + ctx.group_seed) & 0x7FFFFFFF} if self._seeds else {}
                seen = await _asked(socket, "reset", seed)
                said: list[dict[str, Any]] = []
                if self._system_prompt is not None:
                    said.append({"role": "system", "content": self._system_prompt})
                said.append({"role": "user", "content": self._words(seen)})
                while not seen.get("done"):
                    reply = await model.chat(said)
                    seen = await _asked(socket, "step", self._act(reply.text))
                    played["reward"] += float(seen.get("reward") or 0.0)
                    played["steps"] += 1
                    said = [{"role": "user", "content": self._words(seen)}]
        except aiohttp.ClientError as error:
            raise InfrastructureError(f"{self._url}: {error}") from error
        return _result(played)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        return _result(ctx.state) if ctx.state and ctx.state["steps"] else None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
            self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._http

    def _act(self, text: str) -> dict[str, Any]:
        if not self._json:
            return {**self._extra, self._action: text.strip()}
        try:
            return {**self._extra, **msgspec.json.decode(text, type=dict[str, Any])}
        except msgspec.DecodeError:
            # The server says what is wrong with an action better than we do; this one names what the model wrote.
            return {**self._extra, self._action: text.strip()}

    def _words(self, seen: Mapping[str, Any]) -> str:
        observation = seen.get("observation")
        if self._observation is not None and isinstance(observation, Mapping):
            if self._observation not in observation:
                raise EnvError(
                    f"{self._url}: an observation has no field {self._observation!r}, but {', '.join(observation)}: "
                    "set args.observation"
                )
            observation = observation[self._observation]
        return observation if isinstance(observation, str) else msgspec.json.encode(observation).decode()


async def _asked(
    socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """One question and its observation. InfrastructureError when the server goes away, EnvError when it refuses."""
    await socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise InfrastructureError(f"the server ended the session ({message.type.name}) at a {kind}")
    try:
        said = msgspec.json.decode(message.data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise EnvError(f"the server answered a {kind} with no JSON object: {error}") from error
    if said.get("type") == "error":
        raise EnvError(f"the server refused a {kind}: {said.get('data')}")
    found = said.get("data")
    return found if isinstance(found, dict) else {}


def _result(played: Mapping[str, Any]) -> Result:
    return Result(played["reward"], metrics={"steps": float(played["steps"])})
