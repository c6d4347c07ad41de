"""An environment of verifiers, with what it needs to be played on the policy: its agents, its servers, its results."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final

import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.endpoint import Endpoint
from paceline.envs.group_env import Ended, MultiAgentEnv, Seat
from paceline.envs.program import Serves
from paceline.envs.protocol import InfrastructureError, Model, Result, ScoringError, TaskSource
from paceline.errors import ConfigError, EnvError, said_by

_INFRASTRUCTURE: Final = frozenset({"SandboxError", "TunnelError", "InterceptionError"})
"""verifiers' errors that another attempt may not meet again."""

_LIMITS: Final[Mapping[str, Limit]] = {
    "max_turns": "turns",
    "max_input_tokens": "tokens",
    "max_output_tokens": "tokens",
    "max_total_tokens": "tokens",
    "agent_timeout": "deadline",
}
"""Limits of an agent's own that cut a rollout short, by verifiers' word for them."""


class Played:
    """One environment, as its config has it."""

    def __init__(self, given: dict[str, Any], trains: str | Sequence[str] | None) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        clients = importlib.import_module("verifiers.v1.clients")
        self._parts = importlib.import_module("paceline.envs.adapters.verifiers_parts")
        taskset = str((given.get("taskset") or {}).get("id", ""))
        try:
            agents = _agents(loaders.env_config_type(taskset, str(given.get("id", ""))))
        except (ModuleNotFoundError, AttributeError, TypeError) as error:
            raise ConfigError(f"verifiers finds no environment for taskset {taskset!r}: {error}") from error
        bundled = loaders.default_harness_id(taskset) == taskset
        for name, default in agents.items():
            said = given[name] = dict(given.get(name) or {})
            said.setdefault("runtime", {"type": "subprocess"})
            own = default.harness is not None and default.harness.id != "null"
            if not own and not bundled:
                said.setdefault("harness", {"id": self._parts.CHAT})
        # One server, whose client is ours: it knows of each call whose it is.
        given["interception"] = {"type": "server"}
        config = loaders.resolve_env_config(given)
        self.roles = tuple([name for name in agents if getattr(config, name).client is None])
        """The agents that play on the policy, each a rollout of its own; those with a `client` play on that."""
        self._trained = _trained(taskset, tuple(agents), self.roles, trains)
        _refuse_retries(config, self.roles)
        self.env = loaders.load_environment(config)
        self.name = (
            f"{taskset}/{hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest()}"
        )
        self._client = clients.EvalClientConfig(
            base_url="http://policy.invalid/v1", api_key_var="PACELINE_NO_API_KEY"
        )
        self._context = clients.ModelContext(model="policy", client=self._client)
        self._ready: asyncio.Future[Any] | None = None
        self._over = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    # ── its servers ──

    async def _serving(self) -> Any:
        """Where to register a rollout's endpoint, once its servers are up. EnvError when they do not come up."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            # Entered and left by one task: what it opens (MCP clients) may insist on that.
            self._keeper = loop.create_task(self._keep(self._ready))
        return await asyncio.shield(self._ready)

    async def _keep(self, ready: asyncio.Future[Any]) -> None:
        clients = importlib.import_module("verifiers.v1.clients")
        transport = self._parts.ToGateway()
        try:
            async with self.env.serving():
                client = clients.EvalClient(self._client)
                await client.client.aclose()
                client.client = self._parts.httpx.AsyncClient(transport=transport, timeout=None)
                self.env._interception.clients[self._client.model_dump_json()] = client
                ready.set_result(transport)
                await self._over.wait()
                await client.close()
        except Exception as error:  # whatever an environment of anybody's does when it starts
            if ready.done():
                raise
            self._ready = None
            ready.set_exception(EnvError(f"the environment's servers do not come up: {said_by(error)}"))

    async def close(self) -> None:
        self._over.set()
        if self._keeper is not None:
            await self._keeper

    # ── an episode ──

    async def play(
        self, data: Any, models: Mapping[str, Model], seen: Callable[[Any], None] = lambda trace: None
    ) -> Any:
        """One episode of a task, each agent of the policy asking its own of `models`. `seen` is told of each agent's trace
        when it begins."""
        transport = await self._serving()
        endpoints: dict[str, Endpoint] = {}
        minted: list[str] = []

        def begun(trace: Any) -> None:
            if trace.agent.name in endpoints:  # else it plays on a client of its own
                minted.append(trace.id)
                transport.endpoints[trace.id] = endpoints[trace.agent.name]
            seen(trace)

        async with AsyncExitStack() as stack:
            for role, model in models.items():
                endpoints[role] = await stack.enter_async_context(_served(model))
            (slot,) = self.env.slots(data)
            try:
                episode = await self.env.run_slot(slot, self._context, on_trace=begun)
            finally:
                for trace in minted:
                    transport.endpoints.pop(trace, None)
        if episode.errors and not episode.ok:
            raise _raised(episode.errors[-1])
        return episode

    def result(self, episode: Any, role: str) -> Result:
        """What an episode came to for one of its agents. Raises what ended that one, in our words."""
        runs = [trace for trace in episode.traces if trace.agent.name == role]
        for trace in runs:
            if not trace.ok and trace.last_error is not None:
                raise _raised(trace.last_error)
        if role not in self._trained or not all([trace.agent.trainable for trace in runs]):
            # One that is played against may sit out, or play several times: nobody learns from it.
            played = scored(runs[-1]) if runs else Result(None)
            return msgspec.structs.replace(played, trains=False)
        if len(runs) != 1:
            raise EnvError(
                f"the episode ran agent {role!r} {len(runs)} times: one rollout is one run of an agent that trains"
            )
        return scored(runs[0])


class Episodes(MultiAgentEnv):
    """Episodes of several agents that play on the policy: each is a rollout of its own."""

    def __init__(self, played: Played) -> None:
        self.roles = played.roles
        self._played = played

    def tasks(self, split: Split) -> TaskSource:
        raise NotImplementedError("the tasks are those of the environment that these episodes belong to")

    async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Mapping[str, Ended]:
        episode = await self._played.play(task.data, {role: seat.model for role, seat in seats.items()})
        return {role: self._ended(episode, role) for role in seats}

    def _ended(self, episode: Any, role: str) -> Ended:
        try:
            return self._played.result(episode, role)
        except EnvError as error:
            return error


def scored(trace: Any) -> Result:
    """What an agent's run came to."""
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Result(
        reward=trace.reward if rewards else None,
        rewards=rewards if len(rewards) > 1 else {},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        truncated=_LIMITS.get(trace.stop_condition or ""),
        info={"task": msgspec.to_builtins(trace.task.key), "stop": trace.stop_condition or ""},
        trains=bool(trace.agent.trainable),
    )


def _served(model: Model) -> AbstractAsyncContextManager[Endpoint]:
    if not isinstance(model, Serves):
        raise EnvError("this model serves no programs")
    return model.serve()


def _agents(config: Any) -> dict[str, Any]:
    """The agents that an environment's config declares, with its defaults for them."""
    agent = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
    return {
        name: field.default for name, field in config.model_fields.items() if isinstance(field.default, agent)
    }


def _trained(
    taskset: str, agents: Sequence[str], roles: Sequence[str], trains: str | Sequence[str] | None
) -> frozenset[str]:
    """Which of the agents that play on the policy train, as far as the run says."""
    if not roles:
        raise ConfigError(
            f"every agent of taskset {taskset!r} ({', '.join(agents)}) has a client of its own, so the policy plays none: "
            "leave args.env.<agent>.client out for the one to train"
        )
    if trains is None:
        return frozenset(roles)
    named = (trains,) if isinstance(trains, str) else tuple(trains)
    for name in named:
        if name not in agents:
            raise ConfigError(
                f"args.trains names {name!r}, which is none of its agents ({', '.join(agents)})"
            )
        if name not in roles:
            raise ConfigError(
                f"args.trains names {name!r}, which args.env.{name}.client has play on another model: leave one of them out"
            )
    if not named:
        raise ConfigError(f"args.trains is empty: name one of its agents ({', '.join(roles)}) or more")
    return frozenset(named)


def _refuse_retries(config: Any, roles: Sequence[str]) -> None:
    """An attempt that verifiers gives up and begins anew would stay in the rollout, and train on the reward of the next."""
    for name, each in (("", config), *((f".{role}", getattr(config, role)) for role in roles)):
        if each.retries.max_retries or any([rule.max_retries for rule in each.retries.rules]):
            raise ConfigError(
                f"args.env{name}.retries has verifiers try again within a rollout, which would train both attempts: leave it "
                "out; max_attempts of the [[env]] section tries again with a rollout of its own"
            )


def _raised(error: Any) -> EnvError:
    """What the runner judges as it would one of our own."""
    text = f"{error.type}: {error.message}"
    if error.type in _INFRASTRUCTURE:
        return InfrastructureError(text)
    if error.type == "TaskError" and "scoring" in error.message:
        return ScoringError(text)
    return EnvError(text)
