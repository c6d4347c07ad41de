"""The asyncio runtime in a modelled world: the simulator's engines behind the `Engine` port, and an environment that does
what a workload plans. On a virtual-time loop this is the simulation with the real driver, runner and gate.

    book = Book({"env": workload})
    run_driver(setup, {"env": ModelledEnv(book)}, engines=[ModelledEngine("e0", speed, book)], ...)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.domain.commands import StartRollout
from paceline.domain.events import EngineJoined
from paceline.domain.ids import EngineId, EnvName, GroupId, RolloutId, Version, parse_rollout_id
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Finish, Limit, Outcome
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
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.sim.engine import Call, Endpoint, EngineModel, Speed
from paceline.sim.faults import FAILED_CALL, FAILED_LOAD, Faults
from paceline.sim.plan import RolloutPlan, Start, Workload
from paceline.sim.records import blank_ids, blank_logprobs
from paceline.sim.world import WeightsModel


class Book:
    """What engines must know of rollouts and a request does not say: how long the answer will be, and what its context
    shares with others."""

    def __init__(
        self,
        workloads: Mapping[EnvName, Workload],
        faults: Faults | None = None,
        scored_at_once: Mapping[EnvName, int] | None = None,
    ) -> None:
        """`faults`: which attempts, requests and loads fail; None: none does. Engines are not lost. `scored_at_once`: places to be
        scored, by environment; one without has as many as it needs."""
        self.workloads = workloads
        self.scorers = {env: asyncio.Semaphore(places) for env, places in (scored_at_once or {}).items()}
        self.faults = faults or Faults(None, 0)
        self.plans: dict[RolloutId, tuple[EnvName, RolloutPlan]] = {}
        self.left: dict[RolloutId, int] = {}
        """Tokens that the turn under way has still to sample."""
        self.starts: dict[RolloutId, Start] = {}
        """Where the turn under way began, if not behind the turn before, until it has sampled anything."""
        self.conversations: dict[RolloutId, int] = {}
        """To which it belongs, but for 0."""
        self.turns: dict[RolloutId, tuple[int, int, int]] = {}
        """(noise, number of the turn under way, requests of it so far)."""


class ModelledEnv(Environment):
    """Does what the workload plans."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.running = 0

    def tasks(self, split: Split) -> TaskSource:
        return EndlessTasks(lambda index: index, "modelled")

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        book, env = self._book, task.ref.env
        # An environment has no business with the seed itself, only with numbers drawn from it; a model of one does.
        command = StartRollout(ctx.rollout, task.ref, ctx.group_seed, ctx._noise_seed, "", 0)
        plan = book.workloads[env].plan(command, 0.0)
        book.plans[ctx.rollout] = env, plan
        fault = book.faults.of_attempt(ctx._noise_seed, ctx.rollout.attempt, len(plan.turns))
        if plan.start_s:
            await ctx.sleep(plan.start_s)
        turns = zip(plan.turns, _prompts(plan, book, ctx.rollout), strict=True)
        for number, ((wait, _, sampled), ids) in enumerate(turns):
            if wait:
                await ctx.sleep(wait)
            if fault is not None and fault[1] == number:
                raise _raised(fault[0])
            book.turns[ctx.rollout] = ctx._noise_seed, number, 0
            book.left[ctx.rollout] = sampled
            await model.generate(ids, max_tokens=sampled)
        if plan.score_s:
            async with book.scorers.get(env, nullcontext()):
                await ctx.sleep(plan.score_s)
        cause = plan.outcome.cause
        limit: Limit | None = None if cause is None else "tokens" if cause == "tokens" else "context"
        return Result(reward=plan.reward, truncated=limit)


def _raised(outcome: Outcome) -> Exception:
    """What an environment raises that is to end like this."""
    if outcome.cause == "infrastructure":
        return InfrastructureError(outcome.detail)
    return RuntimeError(outcome.detail)


def _prompts(plan: RolloutPlan, book: Book, rollout: RolloutId) -> Iterator[NDArray[np.int32]]:
    """int32[P], the prompt of each turn. What a turn observes that begins anew is named by its number, so that no other context
    begins alike: all else is blank."""
    context = blank_ids(plan.scaffold + plan.prompt)
    ends: list[NDArray[np.int32]] = []
    last: dict[int, NDArray[np.int32]] = {}
    conversation = 0
    for number, (_, observed, sampled) in enumerate(plan.turns):
        start = plan.starts[number] if plan.starts else None
        if start is None:
            context = _then(context, observed)
        else:
            book.starts[rollout] = start
            conversation = book.conversations[rollout] = start.conversation
            kept = ends[start.after] if start.after >= 0 else last.get(conversation, blank_ids(0))
            context = np.append(kept[: start.kept], np.full(observed, number, np.int32))
        yield context
        context = last[conversation] = _then(context, sampled)
        if plan.starts:
            ends.append(context)


def _then(ids: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """int32[P + count], ids and then blank ones."""
    return np.append(ids, blank_ids(count)) if ids.any() else blank_ids(len(ids) + count)


class ModelledEngine:
    """`EngineModel` behind the `Engine` port, on the running loop's clock."""

    def __init__(
        self,
        id: EngineId,
        speed: Speed,
        book: Book,
        weights: WeightsModel | None = None,
        version: Version = 0,
        model: Endpoint | None = None,
    ) -> None:
        """`model`: what answers, if it is not one engine of `speed` that holds `version`."""
        self.model: Endpoint = model or EngineModel(speed, version)
        self.info = EngineInfo(id, speed.kv_tokens, speed.max_model_len)
        self._book = book
        self._weights = weights or WeightsModel()
        self._calls: dict[str, tuple[Call, asyncio.Future[Finish]]] = {}
        self._by_rollout: dict[RolloutId, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loads = 0
        """Loads of weights so far."""
        self._still: asyncio.Future[None] | None = None
        """Set when the engine stands still for new weights."""
        self._chains: dict[tuple[GroupId, str], tuple[tuple[object, int], ...]] = {}

    @property
    def version(self) -> Version:
        return self.model.version

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._calls)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        rollout = parse_rollout_id(request.request_id.rpartition(".t")[0])
        noise, turn, requests = self._book.turns[rollout]
        self._book.turns[rollout] = noise, turn, requests + 1
        fails_in_s = self._book.faults.of_call(noise, rollout.attempt, turn, requests + 1)
        if fails_in_s is not None:
            await asyncio.sleep(fails_in_s)
            raise EngineError(FAILED_CALL)
        left = self._book.left[rollout]
        most = min(left, request.sampling.max_tokens)
        salt = request.cache_salt
        loop = asyncio.get_running_loop()
        conversation = self._book.conversations.get(rollout, 0)
        start = self._book.starts.get(rollout)
        call = Call(
            rollout,
            len(request.token_ids),
            most,
            own=(salt, rollout, conversation) if conversation else (salt, rollout),
            chain=() if conversation else self._chain(rollout, salt),
            block=self.model.speed.block,
            reusable=None if start is None else start.found,
        )
        done: asyncio.Future[Finish] = loop.create_future()
        self._calls[request.request_id] = call, done
        self._by_rollout[rollout] = request.request_id
        self.model.submit(call, loop.time())
        self._arm()
        finish = await done
        self._book.left[rollout] = left - call.sampled
        if call.sampled:
            self._book.starts.pop(rollout, None)
        if finish == "stop" and call.sampled < left:
            finish = "length"
        count = call.sampled
        return GenerateReply(
            blank_ids(count), blank_logprobs(count), finish, call.versions(self.model.version), call.cached
        )

    def _chain(self, rollout: RolloutId, salt: str) -> tuple[tuple[object, int], ...]:
        at = (rollout.group, salt)
        if at not in self._chains:
            env, plan = self._book.plans[rollout]
            block = self.model.speed.block
            scaffold = plan.scaffold // block
            prompt = (plan.scaffold + plan.prompt) // block - scaffold
            parts = (((salt, env), scaffold), ((salt, rollout.group), prompt))
            self._chains[at] = tuple([part for part in parts if part[1]])
        return self._chains[at]

    async def abort(self, request_id: str) -> None:
        self._run()
        if request_id in self._calls:
            call, _ = self._calls[request_id]
            self.model.abort(call, asyncio.get_running_loop().time())
            self._reply(call, "abort")
            self._arm()

    async def load(self) -> EngineLoad:
        self._run()
        return self.model.load(asyncio.get_running_loop().time())

    async def update_weights(self, version: Version, path: str) -> None:
        loop = asyncio.get_running_loop()
        self._run()
        self.model.stop(loop.time(), drain=self._weights.mode == "drain")
        if not self.model.is_still:
            self._still = loop.create_future()
            self._arm()
            await self._still
        if self._weights.load_s:
            await asyncio.sleep(self._weights.load_s)
        self._loads += 1
        fails = self._book.faults.of_load(self.info.id, self._loads)
        recompute = self._weights.mode == "recompute"
        self.model.go_on(loop.time(), None if fails else version, recompute=recompute)
        self._arm()
        if fails:
            raise EngineError(FAILED_LOAD)

    async def revive(self) -> EngineJoined:
        return EngineJoined(self.info, self.version)  # it was never gone

    async def close(self) -> None: ...

    def _reply(self, call: Call, finish: Finish) -> None:
        assert isinstance(call.key, RolloutId)
        _, done = self._calls.pop(self._by_rollout.pop(call.key))
        if not done.done():
            done.set_result(finish)

    def _run(self) -> None:
        """Go on to now. A timer fires a rounding error early or late, so what is as good as due is due."""
        now = asyncio.get_running_loop().time()
        if self.model.next_at <= now + 1e-9:
            for call in self.model.run(max(now, self.model.next_at)):
                self._reply(call, "stop")
        if self.model.is_still and self._still is not None and not self._still.done():
            self._still.set_result(None)

    def _due(self) -> None:
        self._timer = None
        self._run()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.model.next_at < inf:
            self._timer = asyncio.get_running_loop().call_at(self.model.next_at, self._due)
