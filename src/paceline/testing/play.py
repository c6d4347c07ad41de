"""One rollout of your environment against a model that says what it is told, in virtual time.

    rollout = play(Capitals(), ["Paris"])
    assert rollout.outcome.ending == "completed" and rollout.reward == 1.0

Everything around the environment is the real thing: recorder, budgets, endings, deadline. Only the engine is a
script, and waiting takes no time. An environment that serves a program (`model.serve()`) is played in real time, with
a real gateway: `play(env, answers, serve=True)`.

A `GroupEnv` is played by whole groups, each member with answers of its own:

    long, short = play_group(Shortest(), [["Paris, I think"], ["Paris"]])
    assert (long.reward, short.reward) == (0.0, 1.0)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.config import GatewaySection, Limits, SamplingSection
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.events import SegmentEnded, TurnRequested
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.domain.rollout import Finish, Rollout
from paceline.domain.task import Split, TaskRef
from paceline.envs.protocol import Environment
from paceline.envs.surroundings import InRun
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.gateway import Gateway
from paceline.runtime.runner import RolloutRunner
from paceline.testing.loop import run_virtual
from paceline.testing.tokens import byte_tokenizer
from paceline.tokens import Bridge, ChatTokenizer

Answer: TypeAlias = str | BaseException
"""What the model says to one call, or what the engine raises."""

Answers: TypeAlias = Sequence[Answer] | Callable[[str], Answer]
"""One for each call, in order; or a function of the whole prompt as text, chat markup included."""


def play(
    environment: Environment,
    answers: Answers,
    *,
    index: int = 0,
    split: Split = "train",
    member: int = 0,
    seed: int = 0,
    limits: Limits | None = None,
    max_tokens: int = 256,
    token_s: float = 0.0,
    tokenizer: ChatTokenizer | None = None,
    serve: bool = False,
    gateway: GatewaySection | None = None,
) -> Rollout:
    """Run task `index` of `split` once; returns the terminal record, however the rollout ended.

    `member` is the position in the group: members share the group's randomness and differ in their own. A token is
    a byte and takes `token_s` virtual seconds. An environment that makes more calls than there are answers fails.
    `close` is not called. `tokenizer` is one with another chat template; `serve` plays in real time, with the gateway.
    """
    (rollout,) = _played(
        environment,
        {member: answers},
        index=index,
        split=split,
        seed=seed,
        limits=limits,
        max_tokens=max_tokens,
        token_s=token_s,
        tokenizer=tokenizer,
        serve=serve,
        gateway=gateway,
    )
    return rollout


def play_group(
    environment: Environment,
    answers: Sequence[Answers],
    *,
    index: int = 0,
    split: Split = "train",
    seed: int = 0,
    limits: Limits | None = None,
    max_tokens: int = 256,
    token_s: float = 0.0,
    tokenizer: ChatTokenizer | None = None,
    serve: bool = False,
    gateway: GatewaySection | None = None,
) -> list[Rollout]:
    """Run task `index` as one group, with a member for each of `answers`; their terminal records, in that order.

    Members run side by side, as in a run, and the environment is told how many there are. For the rest see `play`.
    """
    environment.bind(InRun(len(answers)))
    return _played(
        environment,
        dict(enumerate(answers)),
        index=index,
        split=split,
        seed=seed,
        limits=limits,
        max_tokens=max_tokens,
        token_s=token_s,
        tokenizer=tokenizer,
        serve=serve,
        gateway=gateway,
    )


def _played(
    environment: Environment,
    answers: Mapping[int, Answers],
    *,
    index: int,
    split: Split,
    seed: int,
    limits: Limits | None,
    max_tokens: int,
    token_s: float,
    tokenizer: ChatTokenizer | None,
    serve: bool,
    gateway: GatewaySection | None,
) -> list[Rollout]:
    """The members of one group, by their positions, each on an engine that says the answers of that one."""
    tokenizer = tokenizer or byte_tokenizer()
    shared = EnvRuntime(
        environment=environment,
        source=environment.tasks(split),
        limits=limits or Limits(),
        sampling=SamplingSection(max_tokens=max_tokens),
        bridge=Bridge(tokenizer),
    )
    commands = [
        StartRollout(
            RolloutId(0, member), TaskRef("env", split, index), seed, seed + member + 1, _engine_of(member), 0
        )
        for member in answers
    ]

    async def main() -> list[Rollout]:
        clock = asyncio.get_running_loop().time
        engines = {
            _engine_of(member): _Engine(_engine_of(member), said, token_s, tokenizer)
            for member, said in answers.items()
        }
        door = Gateway(gateway or GatewaySection(), tokenizer, "scripted") if serve else None
        runner = RolloutRunner({(split, "env"): shared}, engines, _OpenGate(), clock, gateway=door)
        try:
            return list(await asyncio.gather(*map(runner.run, commands)))
        finally:
            if door is not None:
                await door.close()

    return asyncio.run(main()) if serve else run_virtual(main())


def _engine_of(member: int) -> EngineId:
    return EngineId(f"scripted-{member}")


class _OpenGate:
    """Grants every turn at once."""

    def request(self, event: TurnRequested) -> asyncio.Future[GrantTurn]:
        granted: asyncio.Future[GrantTurn] = asyncio.get_running_loop().create_future()
        granted.set_result(GrantTurn(event.rollout, _engine_of(event.rollout.member), 0))
        return granted

    def report(self, event: SegmentEnded) -> None:
        pass


class _Engine:
    """Says what it is told. An abort keeps the tokens that were sampled by then."""

    def __init__(self, name: EngineId, answers: Answers, token_s: float, tokenizer: ChatTokenizer) -> None:
        self.info = EngineInfo(name, None, None)
        self._answers = answers
        self._token_s = token_s
        self._tokenizer = tokenizer
        self._calls = 0
        self._aborted = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        answer = self._next(request)
        if isinstance(answer, BaseException):
            raise answer
        ids = self._said(answer, request.sampling.stop)
        allowed = request.sampling.max_tokens
        finish: Finish = "stop" if len(ids) <= allowed else "length"
        ids = ids[:allowed]
        if not self._token_s:
            return _reply(ids, finish)
        if request.tell is not None:
            return await self._told(request.tell, ids, finish)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(len(ids) * self._token_s):
                await self._aborted.wait()
        except TimeoutError:
            return _reply(ids, finish)
        self._aborted.clear()
        return _reply(ids[: int((loop.time() - began) / self._token_s)], "abort")

    async def _told(
        self, tell: Callable[[Sequence[int]], None], ids: NDArray[np.int32], finish: Finish
    ) -> GenerateReply:
        """Token by token."""
        for told, token in enumerate(ids.tolist()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._token_s):
                    await self._aborted.wait()
            if self._aborted.is_set():
                self._aborted.clear()
                return _reply(ids[:told], "abort")
            tell([token])
        return _reply(ids, finish)

    def _said(self, answer: str, stop: tuple[str, ...]) -> NDArray[np.int32]:
        """The answer up to the first stop string, or to its end and the end token."""
        ends = [at + len(string) for string in stop if (at := answer.find(string)) >= 0]
        if ends:
            return self._tokenizer.encode(answer[: min(ends)])
        return np.array([*self._tokenizer.encode(answer), self._tokenizer.stop_ids[0]], np.int32)

    def _next(self, request: GenerateRequest) -> Answer:
        if callable(self._answers):
            return self._answers(self._tokenizer.decode(request.token_ids.tolist(), keep_special=True))
        self._calls += 1
        if self._calls > len(self._answers):
            raise EngineError(
                f"the environment makes model call {self._calls}, the script has {len(self._answers)} answers"
            )
        return self._answers[self._calls - 1]

    async def abort(self, request_id: str) -> None:
        self._aborted.set()

    async def load(self) -> EngineLoad:
        raise NotImplementedError

    async def update_weights(self, version: int, path: str) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...


def _reply(ids: NDArray[np.int32], finish: Finish) -> GenerateReply:
    runs = ((0, len(ids)),) if len(ids) else ()
    return GenerateReply(ids, np.full(len(ids), -0.5, np.float32), finish, runs)
