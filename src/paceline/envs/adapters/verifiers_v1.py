"""The hub's environments: those of verifiers, v1 (github.com/PrimeIntellect-ai/verifiers).

    [[env]]
    id = "verifiers"
    args = { env = { taskset = { id = "my-taskset" } } }
    workers = { type = "process", python = ".venv-verifiers/bin/python" }

A rollout is one episode. Its agent's program asks verifiers' own server for the model, which counts turns and records its
trace for scoring, and that asks Paceline's gateway, which records ids, logprobs and versions as for any program:

    program of the agent ──▶ verifiers' interception ──▶ the rollout's endpoint ──▶ turn gate ──▶ engine
    reward ◀── the task's rewards, judges and metrics over the trace
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

import msgspec

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.adapters import needed
from paceline.envs.program import Serves
from paceline.envs.protocol import (
    Context,
    Environment,
    InfrastructureError,
    Model,
    Result,
    ScoringError,
    TaskSource,
)
from paceline.errors import ConfigError, EnvError, said_by

_KEPT: Final = 4096
"""Tasks of an endless taskset that are kept, the latest: the members of a group, and retries, ask for the same."""

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


class Verifiers(Environment):
    """One taskset, and the agents that play it. One of them is the policy in training."""

    def __init__(
        self,
        env: Mapping[str, Any] | str,
        eval: Mapping[str, Any] | None = None,
        held_out: int = 10,
        trains: str | None = None,
    ) -> None:
        """`env`: the environment as verifiers' `[env]` table has it, or the taskset's id alone. `eval`: what evals take
        instead (`{ taskset = { split = "test" } }`, say); without it, every `held_out`-th task is theirs alone, none
        if that is 0. `trains`: the agent that is trained, where there are several; the others need a `client`.

        An agent without a `runtime` runs in the worker's host (`subprocess`), one without a `harness` in a chat loop.
        """
        if held_out < 0 or held_out == 1:
            raise ConfigError(
                f"held_out is {held_out}: every n-th task is for evals alone, n from 2 on; 0 holds none out"
            )
        needed("verifiers.v1", "verifiers")
        given = {"taskset": {"id": env}} if isinstance(env, str) else deepcopy(dict(env))
        self._held_out = held_out
        self._train = _Played(given, trains)
        self._eval = self._train
        if eval is not None:
            self._held_out = 0
            self._eval = _Played(_merged(given, eval), trains)

    def tasks(self, split: Split) -> TaskSource:
        played = self._train if split == "train" else self._eval
        if split == "eval" and played is self._train and not self._held_out:
            raise ConfigError(
                "held_out is 0, so there are no tasks for evals: set args.held_out or args.eval"
            )
        return _Tasks(played, split, self._held_out if played is self._train else 0)

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        if not isinstance(model, Serves):
            raise EnvError("this model serves no programs")
        played = self._train if task.ref.split == "train" else self._eval
        transport = await played.serving()
        traces: list[Any] = []
        ctx.state = traces
        async with model.serve() as endpoint:

            def minted(trace: Any) -> None:
                traces.append(trace)
                transport.endpoints[trace.id] = endpoint

            (slot,) = played.env.slots(task.data)
            try:
                episode = await played.env.run_slot(slot, played.context, on_trace=minted)
            finally:
                for trace in traces:
                    transport.endpoints.pop(trace.id, None)
        return played.result(episode)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Scores what there is, where the rewards ask for nothing but the trace."""
        played = self._train if task.ref.split == "train" else self._eval
        traces = [trace for trace in ctx.state or () if played.is_trained(trace)]
        if not traces:
            return None
        rewards = [*task.data.hooks("reward"), *[judge.score for judge in task.data.plugged_judges()]]
        if any("runtime" in inspect.signature(reward).parameters for reward in rewards):
            return None
        await task.data.score(traces[-1])
        return _scored(traces[-1])

    async def close(self) -> None:
        for played in {id(each): each for each in (self._train, self._eval)}.values():
            await played.close()


class _Played:
    """An environment of verifiers, with what it needs to be played on the policy."""

    def __init__(self, given: dict[str, Any], trains: str | None) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        clients = importlib.import_module("verifiers.v1.clients")
        self._parts = importlib.import_module("paceline.envs.adapters.verifiers_parts")
        taskset = str((given.get("taskset") or {}).get("id", ""))
        try:
            roles = _roles(loaders.env_config_type(taskset, str(given.get("id", ""))))
        except (ModuleNotFoundError, AttributeError, TypeError) as error:
            raise ConfigError(f"verifiers finds no environment for taskset {taskset!r}: {error}") from error
        bundled = loaders.default_harness_id(taskset) == taskset
        for role, default in roles.items():
            seat = given[role] = dict(given.get(role) or {})
            seat.setdefault("runtime", {"type": "subprocess"})
            own = default.harness is not None and default.harness.id != "null"
            if not own and not bundled:
                seat.setdefault("harness", {"id": self._parts.CHAT})
        # One server, whose client is ours: it knows of each call whose it is.
        given["interception"] = {"type": "server"}
        config = loaders.resolve_env_config(given)
        self._trained = _trained(roles, trains)
        for role in roles:
            if role != self._trained and getattr(config, role).client is None:
                raise ConfigError(
                    f"agent {role!r} of taskset {taskset!r} would play on the policy and be trained with "
                    f"{self._trained!r}: give it a model of its own, args.env.{role}.client = {{ base_url = ... }}"
                )
        self.env = loaders.load_environment(config)
        self.name = (
            f"{taskset}/{hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest()}"
        )
        self._client = clients.EvalClientConfig(
            base_url="http://policy.invalid/v1", api_key_var="PACELINE_NO_API_KEY"
        )
        self.context = clients.ModelContext(model="policy", client=self._client)
        self._ready: asyncio.Future[Any] | None = None
        self._over = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    # ── its servers ──

    async def serving(self) -> Any:
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

    # ── what an episode comes to ──

    def is_trained(self, trace: Any) -> bool:
        return trace.agent.name in ("", None, self._trained)

    def result(self, episode: Any) -> Result:
        """The trained agent's. Raises what ended the episode or its trace, in our words."""
        if episode.errors and not episode.ok:
            raise _raised(episode.errors[-1])
        mine = [trace for trace in episode.traces if self.is_trained(trace)]
        if len(mine) != 1:
            raise EnvError(
                f"the episode ran agent {self._trained!r} {len(mine)} times: one rollout is one run of it"
            )
        if not mine[0].ok and mine[0].last_error is not None:
            raise _raised(mine[0].last_error)
        return _scored(mine[0])


class _Tasks:
    """A taskset's tasks by position. Of every `held_out` of them, the last is for evals; 0 makes no difference."""

    def __init__(self, played: _Played, split: Split, held_out: int) -> None:
        taskset = played.env.taskset
        self._split, self._held_out = split, held_out
        self._taskset = taskset
        self._listed: list[Any] | None = None
        self._ahead: Iterator[Any] = iter(())
        self._read = 0
        self._late: deque[Any] = deque(maxlen=_KEPT)
        """The last tasks that were read of an endless taskset."""
        if taskset.bounded:
            every = list(taskset)
            chosen = [held_out > 0 and n % held_out == held_out - 1 for n in range(len(every))]
            wanted = split == "eval" and held_out > 0
            self._listed = [task for task, held in zip(every, chosen, strict=True) if held == wanted]
            keys = "".join([task.key for task in self._listed])
            self.fingerprint = hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()
        else:
            self._ahead = iter(taskset)
            self.fingerprint = f"verifiers/{played.name}/{split}/{held_out}"

    @property
    def size(self) -> int | None:
        return None if self._listed is None else len(self._listed)

    def get(self, index: int) -> Any:
        if self._listed is not None:
            return self._listed[index]
        every = self._held_out
        if every:
            index = every * index + every - 1 if self._split == "eval" else index + index // (every - 1)
        if index < self._read - len(self._late):  # long ago: the taskset is read from its beginning
            self._ahead, self._read = iter(self._taskset), 0
            self._late.clear()
        while self._read <= index:
            self._late.append(next(self._ahead))
            self._read += 1
        return self._late[index - self._read]


def _roles(config: Any) -> dict[str, Any]:
    """The agents that an environment's config declares, with its defaults for them."""
    agent = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
    return {
        name: field.default for name, field in config.model_fields.items() if isinstance(field.default, agent)
    }


def _trained(roles: Mapping[str, Any], trains: str | None) -> str:
    names = ", ".join(roles)
    if trains is None and len(roles) == 1:
        return next(iter(roles))
    if trains is None:
        raise ConfigError(f"the environment has several agents ({names}): args.trains names the one to train")
    if trains not in roles:
        raise ConfigError(f"args.trains = {trains!r} is none of its agents ({names})")
    return trains


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(dict(base))
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _scored(trace: Any) -> Result:
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Result(
        reward=trace.reward if rewards else None,
        rewards=rewards if len(rewards) > 1 else {},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        truncated=_LIMITS.get(trace.stop_condition or ""),
        info={"task": msgspec.to_builtins(trace.task.key), "stop": trace.stop_condition or ""},
        trains=bool(trace.agent.trainable),
    )


def _raised(error: Any) -> Exception:
    """What the runner judges as it would one of our own."""
    text = f"{error.type}: {error.message}"
    if error.type in _INFRASTRUCTURE:
        return InfrastructureError(text)
    if error.type == "TaskError" and "scoring" in error.message:
        return ScoringError(text)
    return EnvError(text)
