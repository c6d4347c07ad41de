"""The pool's bookkeeping, with workers that are queues; and the worker's, with nobody behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from worker_kit import HERE

from paceline.config.workers import ProcessWorkers
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.envs.surroundings import InRun
from paceline.envs.workers import wire
from paceline.envs.workers.pool import WorkerPool
from paceline.envs.workers.worker import PULSE_S, Worker


class Link:
    """A worker that opens, and says what the test has it say; None ends it."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self.says.put_nowait([wire.Opened(size=1)])
        self.heard: list[Any] = []

    def send(self, record: Any) -> None:
        self.heard.append(record)

    async def receive(self) -> list[Any] | None:
        return await self.says.get()

    async def close(self, within_s: float) -> str:
        self.says.put_nowait(None)
        return "ended"


@asynccontextmanager
async def pool_of(**settings: Any) -> AsyncIterator[tuple[WorkerPool, list[Link]]]:
    links: list[Link] = []

    async def launch(name: str) -> Link:
        links.append(Link())
        return links[-1]

    opening = wire.Open("any", {}, "env", "train", 1)
    pool = WorkerPool("env", opening, launch, ProcessWorkers(**settings), InRun())
    await pool.start()
    try:
        yield pool, links
    finally:
        await pool.close()


async def until(happens: Any) -> None:
    async with asyncio.timeout(20):
        while not happens():  # noqa: ASYNC110 (nothing to wait on: the pool tells nobody)
            await asyncio.sleep(0.01)


async def test_a_dead_worker_is_replaced_once_even_if_its_calls_would_have_made_it_old() -> None:
    async with pool_of(count=1, recycle_rollouts=1) as (pool, links):
        call = await pool.call()
        links[0].says.put_nowait(None)
        await call.inbox.get()  # told that its worker died
        pool.release(call)
        await until(lambda: len(links) == 2)
        await asyncio.sleep(0.5)
        assert (len(pool.workers), len(links), pool.deaths, pool.recycled) == (1, 2, 1, 0)


async def test_workers_that_die_of_their_first_rollout_are_replaced_ever_more_slowly() -> None:
    async with pool_of(count=1) as (pool, links):
        began = time.monotonic()
        for death in range(3):
            await until(lambda: bool(pool.workers))
            call = await pool.call()
            links[death].says.put_nowait(None)
            await call.inbox.get()
            pool.release(call)
        await until(lambda: len(links) == 4)
        assert time.monotonic() - began > 1.3  # 0.2 + 0.4 + 0.8 s


async def test_a_group_whose_worker_died_stays_with_its_new_one() -> None:
    async with pool_of(count=2, rollouts=1) as (pool, _):
        first = await pool.call("group")
        first.member.link.says.put_nowait(None)  # type: ignore[attr-defined]
        await first.inbox.get()
        second = await pool.call("group")
        pool.release(first, "group")
        third = await pool.call("group")
        assert third.member is second.member is not first.member


async def test_a_worker_is_not_taken_for_dead_because_the_orchestrator_stood_still() -> None:
    hang_s = 1.0
    async with pool_of(count=1, hang_s=hang_s) as (pool, links):
        time.sleep(hang_s + PULSE_S + 0.3)  # noqa: ASYNC251 (what it is about)
        # As from a socket: read in the loop's next turn, which is also the one in which the timer is due.
        asyncio.get_running_loop().call_soon(links[0].says.put_nowait, [wire.Pulse(0, 0.0, 0.0)])
        await asyncio.sleep(0.2)
        assert (len(pool.workers), pool.deaths) == (1, 0)
        await until(lambda: pool.deaths == 1)  # and now it is silent


async def started(does: str) -> tuple[Worker, list[Any]]:
    """A worker with one rollout, number 7, whose model has answered; and all that it says."""
    said: list[Any] = []
    worker = Worker(said.append)
    worker.take(wire.Open("worker_envs:Told", {"does": does}, "env", "train", 1))
    await until(lambda: bool(said))
    worker.take(wire.Start(7, RolloutId(0, 0, 0), TaskRef("env", "train", 0), 1, 2, 60.0))
    await until(lambda: isinstance(said[-1], wire.Ask))
    worker.take(wire.Replied(7, said[-1].ask, wire.Said("hello", "stop", b"", b"")))
    return worker, said


async def closed(worker: Worker) -> None:
    worker.take(wire.Close())
    await worker.closed.wait()


async def test_a_late_refusal_to_a_rollout_that_is_over_reaches_nobody_else() -> None:
    worker, said = await started("cold")
    await until(lambda: isinstance(said[-1], wire.BeginCold))
    worker.take(wire.Refused(3, said[-1].ask, "cancelled", "the rollout is being cancelled"))
    worker.take(wire.Served(said[-1].ask, None))
    await until(lambda: isinstance(said[-1], wire.Ended))
    assert said[-1].failure is None
    await closed(worker)


async def test_what_cannot_be_sent_ends_its_rollout_all_the_same() -> None:
    worker, said = await started("raise half a character")
    send = worker._send
    worker._send = lambda record: (wire.encoded(record), send(record))  # type: ignore[func-returns-value]
    await until(lambda: isinstance(said[-1], wire.Ended))
    assert said[-1].failure.text.startswith("ValueError: no file \\udcff")
    await closed(worker)


async def test_a_worker_that_cannot_be_heard_any_more_ends_its_calls_whatever_the_reason() -> None:
    async with pool_of(count=1) as (pool, links):
        call = await pool.call()
        links[0].says.put_nowait([object()])  # no record, and nothing that has a call
        links[0].says.put_nowait([wire.Pulse(1, "much", 0.0)])  # type: ignore[arg-type]
        pool._settings = ProcessWorkers(recycle_mb=1)
        died = await call.inbox.get()
        assert "reading what it says failed: TypeError" in died.why  # type: ignore[union-attr]
        await until(lambda: len(links) == 2)
        assert pool.deaths == 1


def test_frames_hold_what_they_can_and_a_record_that_none_holds_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    records = [wire.encoded(wire.Refused(1, ask, "error", "x" * 20)) for ask in range(7)]
    framed = list(wire.frames(records))
    assert 1 < len(framed) < 7
    read = []
    for each in framed:
        assert wire.length_of(each[:4]) == len(each) - 4 <= 100
        read += wire.for_worker(each[4:])
    assert [record.ask for record in read] == list(range(7))  # type: ignore[union-attr]
    assert list(wire.frames([])) == []
    with pytest.raises(wire.TooLarge, match=r"Refused of 0 MiB: at most 0 MiB cross"):
        wire.encoded(wire.Refused(1, 1, "error", "x" * 100))


async def test_what_is_too_large_to_cross_fails_its_rollout_by_name(monkeypatch: Any) -> None:
    said: list[Any] = []

    def send(record: Any) -> None:
        wire.encoded(record)
        said.append(record)

    worker = Worker(send)
    worker.take(wire.Open("worker_envs:Large", {}, "env", "train", 1, (str(HERE),)))
    await until(lambda: said and isinstance(said[-1], wire.Opened))
    monkeypatch.setattr(wire, "MOST_BYTES", 2000)
    for number, index in enumerate((0, 1)):
        start = wire.Start(number, RolloutId(3, number), TaskRef("env", "train", index), 0, 0, 60.0)
        worker.take(start)
        await until(lambda: said and isinstance(said[-1], wire.Ended))
        failure = said.pop().failure
        assert failure.kind == "environment"
        assert f"rollout {RolloutId(3, number)}: {('Ask', 'Ended')[index]} of 0 MiB" in failure.text
