"""The hub's environments: those of verifiers, v1 (github.com/PrimeIntellect-ai/verifiers).

    [[env]]
    id = "verifiers"
    args = { env = { taskset = { id = "my-taskset" } } }
    workers = { type = "process", python = ".venv-verifiers/bin/python" }

A rollout is one episode; or, where several of its agents play on the policy, one agent's part in it. The agent's program
asks verifiers' own server for the model, which counts turns and records its trace for scoring, and that asks Paceline's
gateway, which records ids, logprobs and versions as for any program:

    program of the agent ──▶ verifiers' interception ──▶ the rollout's endpoint ──▶ turn gate ──▶ engine
    reward ◀── the task's rewards, judges and metrics over the trace
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from paceline.domain.rollout import Limit
from paceline.domain.task import Split, Task
from paceline.envs.adapters import needed
from paceline.envs.adapters.verifiers_played import Episodes, Played, scored
from paceline.envs.protocol import Context, Environment, Model, Result, TaskSource
from paceline.envs.surroundings import Surroundings
from paceline.errors import ConfigError

_KEPT: Final = 4096
"""Tasks of an endless taskset that are kept, the latest: the members of a group, and retries, ask for the same."""


class Verifiers(Environment):
    """One taskset, and the agents that play it."""

    def __init__(
        self,
        env: Mapping[str, Any] | str,
        eval: Mapping[str, Any] | None = None,
        held_out: int = 10,
        trains: str | Sequence[str] | None = None,
    ) -> None:
        """`env`: the environment as verifiers' `[env]` table has it, or the taskset's id alone. `eval`: what evals take
        instead (`{ taskset = { split = "test" } }`, say); without it, every `held_out`-th task is theirs alone, none
        if that is 0.

        An agent without a `client` plays on the policy. Where several do, each is a rollout of its own, and the members of
        a group play one episode or more. `trains`: which of them learn; without it, all that the environment lets learn.
        The others are played against.

        An agent without a `runtime` runs in the worker's host (`subprocess`), one without a `harness` in a chat loop.
        """
        if held_out < 0 or held_out == 1:
            raise ConfigError(
                f"held_out is {held_out}: every n-th task is for evals alone, n from 2 on; 0 holds none out"
            )
        needed("verifiers.v1", "verifiers")
        given = {"taskset": {"id": env}} if isinstance(env, str) else deepcopy(dict(env))
        self._held_out = held_out
        self._train = Played(deepcopy(given), trains)
        self._eval = self._train
        if eval is not None:
            self._held_out = 0
            self._eval = Played(_merged(given, eval), trains)
            if self._eval.roles != self._train.roles:
                raise ConfigError(
                    f"args.eval has {_listed(self._eval.roles)} play on the policy, and args.env {_listed(self._train.roles)}: "
                    "an environment deals its groups in one way, so give both the same clients"
                )
        self.roles = self._train.roles if len(self._train.roles) > 1 else ()
        # What the class says for all its objects where the number of agents is fixed, this one says for itself.
        self.whole_group = bool(self.roles)  # type: ignore[misc]
        self._episodes = {id(played): Episodes(played) for played in (self._train, self._eval)}

    def bind(self, surroundings: Surroundings) -> None:
        super().bind(surroundings)
        for episodes in self._episodes.values():
            episodes.bind(surroundings)

    def tasks(self, split: Split) -> TaskSource:
        played = self._played(split)
        if split == "eval" and played is self._train and not self._held_out:
            raise ConfigError(
                "held_out is 0, so there are no tasks for evals: set args.held_out or args.eval"
            )
        return _Tasks(played, split, self._held_out if played is self._train else 0)

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        played = self._played(task.ref.split)
        if self.whole_group:
            return await self._episodes[id(played)].rollout(task, model, ctx)
        (role,) = played.roles
        traces: list[Any] = []
        ctx.state = traces
        return played.result(await played.play(task.data, {role: model}, traces.append), role)

    async def on_truncated(self, task: Task, model: Model, ctx: Context, limit: Limit) -> Result | None:
        """Scores what there is of an agent that plays alone, where the rewards ask for nothing but the trace."""
        played = self._played(task.ref.split)
        traces = [trace for trace in ctx.state or () if trace.agent.name == played.roles[0]]
        if not traces:
            return None
        rewards = [*task.data.hooks("reward"), *[judge.score for judge in task.data.plugged_judges()]]
        if any("runtime" in inspect.signature(reward).parameters for reward in rewards):
            return None
        await task.data.score(traces[-1])
        return scored(traces[-1])

    async def close(self) -> None:
        for played in {id(each): each for each in (self._train, self._eval)}.values():
            await played.close()

    def _played(self, split: Split) -> Played:
        return self._train if split == "train" else self._eval


class _Tasks:
    """A taskset's tasks by position. Of every `held_out` of them, the last is for evals; 0 makes no difference."""

    def __init__(self, played: Played, split: Split, held_out: int) -> None:
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


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(dict(base))
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
