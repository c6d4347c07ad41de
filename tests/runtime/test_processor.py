"""Closed groups that need the outside: every one is answered, whatever a service does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.core.advantages import Advantages, Algorithm, GroupView, ServiceRequest
from paceline.core.processing import GroupRules
from paceline.domain.events import GroupProcessed
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import COMPLETED, Rollout, Turn
from paceline.domain.task import TaskRef
from paceline.runtime.offload import Inline, Threads
from paceline.runtime.processor import SERVICE_S, SLOW_S, SMALL_TOKENS, EnvProcessing, GroupProcessor
from paceline.testing import run_virtual

TASK = TaskRef("env", "train", 0)


class Judge(Algorithm):
    """Asks for three opinions on a group of two."""

    name = "judge"

    def requests(self, view: GroupView) -> Sequence[ServiceRequest]:
        return [ServiceRequest("judge", number) for number in range(3)]

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        return Advantages(np.array([replies[0], -replies[2]], np.float64))


class Judges:
    """The first request is answered by `first`, the second at once, the third with `patience`."""

    def __init__(self, first: Callable[[], Awaitable[Any]], patience: float = 5000.0) -> None:
        self.waiting: set[int] = set()
        self._first = first
        self._patience = patience

    async def call(self, service: str, request: Any) -> Any:
        self.waiting.add(request)
        try:
            if request == 0:
                return await self._first()
            await asyncio.sleep(self._patience * (request - 1))
            return request
        finally:
            self.waiting.remove(request)


def group(tokens: int = 2) -> ClosedGroup:
    ids, logprobs = np.ones(tokens, np.int32), np.full(tokens, -0.5, np.float32)
    turn = Turn(ids, ids, logprobs, ((0, tokens),), False, "stop")
    members = [
        Rollout(id=RolloutId(0, n), task=TASK, outcome=COMPLETED, turns=(turn,), reward=1.0) for n in (0, 1)
    ]
    return ClosedGroup(0, TASK, 2, tuple(members))


class Leaves(Algorithm):
    """Advantages of 1 and -1, if that; it asks for nothing."""

    name = "leaves"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
        if self.error is not None:
            raise self.error
        return Advantages(np.array([1.0, -1.0]))


def processed_soon(algorithm: Algorithm, closed: ClosedGroup) -> list[GroupProcessed] | None:
    """What is told within the next turns of the loop; None when `process_soon` takes it not."""

    async def main() -> list[GroupProcessed] | None:
        told: list[GroupProcessed] = []
        how = EnvProcessing(GroupRules(env="env", seq_len=64), algorithm)
        failed: list[BaseException] = []
        if not GroupProcessor({"env": how}, Inline()).process_soon(closed, told.append, failed.append):
            return None
        assert not told, "not inside the call: whoever closed the group is not done"
        await asyncio.sleep(0)
        assert not failed
        return told

    return run_virtual(main())


def test_a_small_group_whose_algorithm_asks_for_nothing_is_processed_on_the_loop() -> None:
    told = processed_soon(Leaves(), group())
    assert told is not None
    (answer,) = told
    assert answer.error is None
    assert [verdict.advantage for verdict in answer.result.verdicts] == [1.0, -1.0]


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize(
    "error", [ValueError("no"), asyncio.CancelledError("no"), StopIteration("no"), Panic("no")]
)
def test_what_an_algorithm_raises_on_the_loop_fails_its_group(error: BaseException) -> None:
    told = processed_soon(Leaves(error), group())
    assert told is not None
    (answer,) = told
    assert answer.error is not None
    assert type(error).__name__ in answer.error
    assert [verdict.fate for verdict in answer.result.verdicts] == ["failed", "failed"]


async def test_a_fault_of_ours_in_a_group_is_told_and_does_not_leave_it_unanswered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: Any) -> None:
        raise LookupError("ours")

    monkeypatch.setattr("paceline.runtime.processor.broken_group", breaks)
    how = EnvProcessing(GroupRules(env="env", seq_len=64), Leaves(ValueError("no")))
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    assert GroupProcessor({"env": how}, Inline()).process_soon(group(), pytest.fail, failed.set_result)
    async with asyncio.timeout(30):
        assert str(await failed) == "ours"


SET_BY: ContextVar[str] = ContextVar("SET_BY", default="nobody")


async def test_an_algorithm_finds_nothing_of_what_an_environment_has_set_in_its_context() -> None:
    found: list[str] = []

    class Looks(Leaves):
        def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
            found.append(SET_BY.get())
            return super().advantages(view, replies)

    processor = GroupProcessor({"env": EnvProcessing(GroupRules(env="env", seq_len=64), Looks())}, Inline())
    told: asyncio.Future[GroupProcessed] = asyncio.get_running_loop().create_future()

    async def rollout() -> None:
        SET_BY.set("an environment")
        assert processor.process_soon(group(), told.set_result, pytest.fail)

    async with asyncio.timeout(30):
        await asyncio.create_task(rollout())
        await told
    assert found == ["nobody"]


async def test_groups_of_an_algorithm_that_has_held_up_the_loop_go_to_the_thread() -> None:
    class Computes(Leaves):
        def advantages(self, view: GroupView, replies: Sequence[Any]) -> Advantages:
            time.sleep(1.1 * SLOW_S)
            return super().advantages(view, replies)

    envs = {
        name: EnvProcessing(GroupRules(env=name, seq_len=64), kind)
        for name, kind in (("env", Computes()), ("other", Leaves()))
    }
    threads = Threads()
    processor = GroupProcessor(envs, threads)
    told: asyncio.Future[GroupProcessed] = asyncio.get_running_loop().create_future()
    assert processor.process_soon(group(), told.set_result, pytest.fail)
    try:
        async with asyncio.timeout(60):
            await told
            assert not processor.process_soon(group(), pytest.fail, pytest.fail)
            assert (await processor.process(group())).error is None
    finally:
        threads.close()
    other = msgspec.structs.replace(group(), task=TaskRef("other", "train", 0))
    assert processor.process_soon(other, lambda _: None, pytest.fail)


@pytest.mark.parametrize(
    ("algorithm", "closed"), [(Judge(), group()), (Leaves(), group(SMALL_TOKENS))], ids=["asks", "long"]
)
def test_what_takes_a_service_or_a_thread_is_not(algorithm: Algorithm, closed: ClosedGroup) -> None:
    assert processed_soon(algorithm, closed) is None


def processed(judges: Judges) -> tuple[GroupProcessed, float]:
    """The answer, and the second it came."""

    async def main() -> tuple[GroupProcessed, float]:
        how = EnvProcessing(GroupRules(env="env", seq_len=64), Judge())
        answer = await GroupProcessor({"env": how}, Inline(), judges).process(group())
        assert not judges.waiting, "requests that nobody waits for any more"
        return answer, asyncio.get_running_loop().time()

    return run_virtual(main())


async def agrees() -> float:
    return 1.0


async def refuses() -> float:
    await asyncio.sleep(1)
    raise ValueError("no quota")


async def cancels_itself() -> float:
    raise asyncio.CancelledError


async def never_answers() -> float:
    return await asyncio.Event().wait()


def test_replies_come_in_the_order_of_the_requests() -> None:
    answer, at = processed(Judges(agrees, patience=7.0))
    assert answer.error is None
    assert [verdict.advantage for verdict in answer.result.verdicts] == [1.0, -2.0]
    assert at == 7.0


@pytest.mark.parametrize(
    ("first", "told", "after"),
    [
        (refuses, "ValueError: no quota", 1.0),
        (cancels_itself, "RuntimeError: service 'judge' raised CancelledError by itself", 0.0),
        (never_answers, f"TimeoutError: service 'judge' gave no answer within {SERVICE_S:g} s", SERVICE_S),
    ],
)
def test_a_service_that_fails_fails_its_group_and_ends_the_groups_other_requests(
    first: Callable[[], Awaitable[Any]], told: str, after: float
) -> None:
    answer, at = processed(Judges(first))
    assert answer.error is not None
    assert answer.error.startswith(told)
    assert [verdict.fate for verdict in answer.result.verdicts] == ["failed", "failed"]
    assert at == after
