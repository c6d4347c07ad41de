"""Closed groups: fetch what their algorithm asks for, then process them: small ones in slices, others in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, Protocol

import msgspec

from paceline.core.advantages import Algorithm, ServiceRequest
from paceline.core.processing import (
    GroupRules,
    asks_nothing,
    broken_group,
    process_group,
    service_requests,
)
from paceline.domain.events import GroupProcessed
from paceline.domain.group import ClosedGroup
from paceline.domain.ids import EnvName
from paceline.errors import said_by
from paceline.ports import Services
from paceline.runtime.offload import SLICE_S, Offload, Slices, carried, is_cancelled

SERVICE_CALLS = 64
"""Requests of all algorithms under way at once."""

SERVICE_S = 600.0
"""Seconds that one request may take: a judge that never answers would keep its group's places in batches for ever."""

SMALL_TOKENS = 16_384
"""Tokens up to which a group is processed on the loop, in slices: about 0.2 ms of work, where the hop to a thread and
back costs two wake-ups of a sleeping thread, and the fight for the interpreter."""


SLOW_S = 0.05
"""A small group that takes longer has an algorithm that computes, or waits: the next of its environment go to the thread."""


class EnvProcessing(msgspec.Struct, frozen=True):
    """How groups of one environment are processed."""

    rules: GroupRules
    algorithm: Algorithm


Tell = Callable[[GroupProcessed], None]
Fail = Callable[[BaseException], None]


class Processor(Protocol):
    """Answers `ProcessGroup`."""

    def process_soon(self, group: ClosedGroup, tell: Tell, fail: Fail) -> bool:
        """Process it on the loop, soon, and tell the answer, if that needs neither a thread nor I/O; False where it does.
        It costs a third of what a task around `process` does. `fail` hears of what is a bug of ours."""
        ...

    async def process(self, group: ClosedGroup) -> GroupProcessed: ...


class GroupProcessor:
    """Answers `ProcessGroup` with exactly one `GroupProcessed`, whatever the algorithm or its services raise."""

    def __init__(
        self,
        envs: Mapping[EnvName, EnvProcessing],
        offload: Offload,
        services: Services | None = None,
        *,
        slice_s: float = SLICE_S,
    ) -> None:
        """`slice_s`: longest stretch of small groups; infinite where runs must repeat, since it is measured in real time."""
        self._envs = envs
        self._offload = offload
        self._slices = Slices(slice_s)
        self._slow: set[EnvName] = set()
        self._slow_s = SLOW_S if isfinite(slice_s) else inf
        self._services = services
        self._calls = asyncio.Semaphore(SERVICE_CALLS)

    def process_soon(self, group: ClosedGroup, tell: Tell, fail: Fail) -> bool:
        how = self._envs[group.task.env]
        if not (self._goes_on_the_loop(group) and asks_nothing(how.algorithm)):
            return False
        began = time.perf_counter()

        def work() -> None:
            started = time.perf_counter()
            try:
                try:
                    result = carried(process_group, group, how.rules, how.algorithm)
                except Exception as error:
                    answer = _broken(group, error, began)
                else:
                    answer = GroupProcessed(result, time.perf_counter() - began)
            except Exception as error:  # nobody else would hear of it, and the group never be answered
                fail(error)
                return
            if time.perf_counter() - started > self._slow_s:
                self._slow.add(group.task.env)
            tell(answer)

        self._slices.add(work)
        return True

    def _goes_on_the_loop(self, group: ClosedGroup) -> bool:
        return group.task.env not in self._slow and _is_small(group)

    async def process(self, group: ClosedGroup) -> GroupProcessed:
        began = time.perf_counter()
        how = self._envs[group.task.env]
        try:
            asked = carried(service_requests, group, how.rules, how.algorithm)
            replies = await self._fetch(asked) if asked else ()
            offload = self._slices if self._goes_on_the_loop(group) else self._offload
            result = await offload.run(process_group, group, how.rules, how.algorithm, replies)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _broken(group, error, began)
        return GroupProcessed(result, time.perf_counter() - began)

    async def _fetch(self, requests: tuple[ServiceRequest, ...]) -> tuple[Any, ...]:
        async def one(request: ServiceRequest) -> Any:
            if self._services is None:
                raise LookupError(
                    f"the algorithm asks for service {request.service!r}, but none is configured"
                )
            async with self._calls:
                try:
                    async with asyncio.timeout(SERVICE_S) as limit:
                        return await self._services.call(request.service, request.payload)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise TimeoutError(
                        f"service {request.service!r} gave no answer within {SERVICE_S:g} s"
                    ) from None
                except asyncio.CancelledError as error:
                    if is_cancelled():
                        raise
                    # A task that ends so is forgotten without a word, and its group would never be answered.
                    raise RuntimeError(
                        f"service {request.service!r} raised CancelledError by itself"
                    ) from error

        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(one(request)) for request in requests]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others were cancelled: their answers are of no use
        return tuple([task.result() for task in tasks])


def _broken(group: ClosedGroup, error: Exception, began: float) -> GroupProcessed:
    """The answer where the user's algorithm or service has raised. The group trains nothing; the dead-group limit ends a
    run in which that is all that happens, with this text."""
    text = said_by(error)
    return GroupProcessed(broken_group(group, text), time.perf_counter() - began, text)


def _is_small(group: ClosedGroup) -> bool:
    left = SMALL_TOKENS
    for rollout in group.rollouts:
        for turn in rollout.turns:
            left -= len(turn.prompt_ids) + len(turn.sampled_ids)
        if left < 0:
            return False
    return True
