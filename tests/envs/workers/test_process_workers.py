"""Environments in worker processes: the same records as inline, and whatever a worker does costs its rollouts alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from worker_kit import Engine, inside

from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError


def told(rollout: Rollout) -> Any:
    """What of a record does not depend on clocks and processes."""
    return msgspec.structs.replace(
        rollout,
        started=0.0,
        ended=0.0,
        model_s=0.0,
        gate_s=0.0,
        metrics={},
        info={k: v for k, v in rollout.info.items() if k != "pid"},
        turns=tuple(
            (
                t.prompt_ids.tolist(),
                t.sampled_ids.tolist(),
                t.logprobs.tolist(),
                t.versions,
                t.extends,
                t.finish,
            )
            for t in rollout.turns
        ),
    )


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_rollout_in_a_worker_is_recorded_as_an_inline_one_however_it_ends(tmp_path: Path) -> None:
    from worker_envs import Told
    from worker_kit import Inside

    from paceline.config import Limits

    for does in ("answer", "raise", "infrastructure", "cancel itself", "talk", "return too much"):
        here = Inside(Told(does), Limits(max_turns=3), Engine())
        async with inside(tmp_path, "Told", {"does": does}, limits={"max_turns": 3}) as there:
            assert told(await there.roll_out(2, index=1)) == told(await here.roll_out(2, index=1)), does
            assert there.gate.granted == here.gate.granted


async def test_the_worker_is_another_process_and_every_model_call_passes_the_gate(tmp_path: Path) -> None:
    async with inside(tmp_path, "Echo", count=2) as run:
        rollouts = await asyncio.gather(*(run.roll_out(m, index=m) for m in range(8)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        assert [r.info["data"] for r in rollouts] == [f"task {n}" for n in range(8)]
        pids = {int(r.metrics["pid"]) for r in rollouts}
        assert len(pids) == 2
        assert os.getpid() not in pids
        assert run.gate.granted == len(run.engine.requests) == 8
        assert [c.laddr for pid in pids for c in psutil.Process(pid).net_connections("inet")] == []


async def test_s78_a_killed_worker_delivers_what_it_had_said_and_costs_its_rollouts_a_retry(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path, "Told", {"does": "wait", "seconds": 60}) as run:
        (worker,) = run.pool.workers
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(3)]
        await run.when(lambda: len(run.engine.requests) == 3)
        began = time.monotonic()
        os.kill(worker.link.child.pid, signal.SIGKILL)
        ended = await asyncio.gather(*pending)
        assert time.monotonic() - began < 10
        for rollout in ended:
            assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "infrastructure")
            assert "SIGKILL" in rollout.outcome.detail
            assert rollout.sampled_tokens > 0  # its turn is kept, and its tokens are counted
        await run.when(lambda: len(run.pool.workers) == 1 and run.pool.workers[0] is not worker)
        assert run.pool.deaths == 1


async def test_s78_a_result_that_lay_in_the_socket_when_the_worker_was_killed_is_delivered(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path, "Told", {"does": "the last takes the worker along", "seconds": 4}) as run:
        (worker,) = run.pool.workers
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(4)]
        await run.when(lambda: len(run.engine.requests) == 4)
        for _ in range(5):
            await asyncio.sleep(0)  # the answers are in the socket
        # The orchestrator hears nothing until the worker is dead: the result and the end are there at once.
        deadline = time.monotonic() + 60
        while runs(worker.link.child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)  # noqa: ASYNC251 (what it is there for)
        first, *others = await asyncio.gather(*pending)
        assert (first.outcome.ending, first.reward) == ("completed", 1.0)
        assert [r.outcome.cause for r in others] == ["infrastructure"] * 3


async def test_s78_a_retry_finds_the_new_worker_which_gets_nothing_before_it_is_ready(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "kill once"}) as run:
        first = await run.roll_out()
        assert first.outcome.cause == "infrastructure"
        again = await run.roll_out(attempt=1)
        assert again.outcome.ending == "completed"
        assert again.turns[0].prompt_ids.tolist() == first.turns[0].prompt_ids.tolist()


async def test_a_worker_that_is_killed_by_its_rollouts_does_not_touch_those_of_another(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path, "Told", {"does": "wait", "seconds": 1.0}, count=2) as run:
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(4)]
        await run.when(lambda: len(run.engine.requests) == 4)
        os.kill(run.pool.workers[0].link.child.pid, signal.SIGKILL)
        endings = sorted(r.outcome.ending for r in await asyncio.gather(*pending))
        assert endings == ["completed", "completed", "failed", "failed"]


async def test_a_worker_whose_loop_hangs_is_killed(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "block", "seconds": 60}, hang_s=2.0) as run:
        began = time.monotonic()
        rollout = await run.roll_out()
        assert time.monotonic() - began < 20
        assert (rollout.outcome.cause, "hang_s" in rollout.outcome.detail) == ("infrastructure", True)


async def test_s03_a_deadline_reaches_into_the_worker_and_keeps_the_gradeable_prefix(tmp_path: Path) -> None:
    async with inside(
        tmp_path, "Told", {"does": "stubborn", "seconds": 60}, limits={"deadline_s": 1.0}
    ) as run:
        rollout = await run.roll_out()
        assert (rollout.outcome.ending, rollout.outcome.cause, rollout.reward) == (
            "truncated",
            "deadline",
            0.25,
        )
        assert rollout.info == {"last": "hello"}
        assert rollout.ended - rollout.started >= 1.3  # its clean-up is awaited
        assert run.pool.workers[0].calls == {}


async def test_a_cancelled_rollout_ends_when_its_code_has_stopped(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "stubborn", "seconds": 60}) as run:
        pending = asyncio.create_task(run.roll_out())
        await run.when(lambda: len(run.engine.requests) == 1)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        run.runner.cancel(run_id(), "stale")
        rollout = await pending
        assert (rollout.outcome.ending, rollout.outcome.cause) == ("cancelled", "stale")
        assert 0.25 < time.monotonic() - began < 5
        assert run.pool.workers[0].calls == {}  # its place is free again


def run_id() -> Any:
    from paceline.domain.ids import RolloutId

    return RolloutId(0, 0)


async def test_a_worker_that_leaks_is_drained_and_replaced(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "leak"}, recycle_mb=150) as run:
        first = run.pool.workers[0]
        for _ in range(3):
            assert (await run.roll_out()).outcome.ending == "completed"
        await run.when(lambda: run.pool.recycled > 0 and first not in run.pool.workers)
        assert (await run.roll_out()).outcome.ending == "completed"
        assert run.pool.deaths == 0


async def test_an_old_worker_is_drained_and_its_last_rollouts_end_well(tmp_path: Path) -> None:
    async with inside(
        tmp_path, "Told", {"does": "wait", "seconds": 0.5}, recycle_rollouts=2, rollouts=4
    ) as run:
        rollouts = await asyncio.gather(*(run.roll_out(m) for m in range(12)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        assert len({r.info["pid"] for r in rollouts}) > 1
        assert (run.pool.deaths, run.pool.recycled > 0) == (0, True)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private mappings on Linux alone")
async def test_memory_beyond_the_limit_is_refused_to_the_code_that_asks(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "allocate"}, memory_mb=1024) as run:
        rollout = await run.roll_out()
        assert (rollout.outcome.cause, rollout.outcome.detail.startswith("MemoryError")) == (
            "environment",
            True,
        )
        assert run.pool.deaths == 0


async def test_rollouts_beyond_what_a_worker_holds_wait_in_line(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "wait", "seconds": 0.3}, rollouts=2) as run:
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(6)]
        held = 0
        while not all(task.done() for task in pending):
            held = max(held, len(run.pool.workers[0].calls))
            await asyncio.sleep(0.005)
        assert held == 2
        assert {task.result().outcome.ending for task in pending} == {"completed"}


@pytest.mark.parametrize(
    ("env", "says"), [("Broken", "licence server"), ("Dies", "exit code 7"), ("Nobody", "Nobody")]
)
async def test_workers_that_cannot_start_say_why(tmp_path: Path, env: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with inside(tmp_path, env):
            pass


async def test_an_interpreter_that_is_not_there_or_lacks_packages_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no program"):
        async with inside(tmp_path, "Echo", python="/nowhere/python"):
            pass
    bare = tmp_path / "bare"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "venv", "--without-pip", str(bare))
    assert await process.wait() == 0
    with pytest.raises(ConfigError, match="lacks msgspec numpy pydantic"):
        async with inside(tmp_path, "Echo", python=str(bare / "bin" / "python")):
            pass


async def test_s90_cold_starts_hold_over_all_workers_and_a_killed_one_gives_its_places_back(
    tmp_path: Path,
) -> None:
    section = {"cold_starts": 2, "cold_starts_per_s": 8.0}
    async with inside(tmp_path, "Told", {"does": "cold", "seconds": 0.01}, count=3, section=section) as run:
        asked = time.monotonic()
        rollouts = await asyncio.gather(*(run.roll_out(m) for m in range(24)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        # Eight in any second; what a busy machine adds makes each only later.
        starts = sorted(float(r.info["began"]) - asked for r in rollouts)
        assert [at >= n // 8 for n, at in enumerate(starts)] == [True] * 24
    async with inside(tmp_path, "Told", {"does": "cold kill"}, section={"cold_starts": 1}) as run:
        for _ in range(3):
            assert (await run.roll_out()).outcome.cause == "infrastructure"


async def test_a_worker_asks_the_services_of_the_run(tmp_path: Path) -> None:
    async def ask(service: str, request: Any) -> Any:
        return {"judge": len(request["text"])}[service]

    async with inside(tmp_path, "Told", {"does": "ask"}, ask=ask) as run:
        assert (await run.roll_out()).reward == 5.0


async def test_thousands_of_rollouts_at_once_in_one_worker(tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "all at once", "seconds": 2000}, rollouts=3000) as run:
        rollouts = await asyncio.gather(*(run.roll_out(m) for m in range(2000)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        assert len({r.info["pid"] for r in rollouts}) == 1


async def test_nothing_of_a_worker_is_left_when_it_is_closed(tmp_path: Path) -> None:
    async with inside(tmp_path, "Echo", count=2) as run:
        pids = [worker.link.child.pid for worker in run.pool.workers]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
