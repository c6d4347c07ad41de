"""Programs of environments in workers ask the policy through the orchestrator's gateway; nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_process_workers import told
from worker_envs import Program
from worker_kit import HERE, Engine, Inside, inside

from paceline.config import GatewaySection, Limits
from paceline.runtime.gateway import Gateway
from paceline.testing.tokens import byte_tokenizer


def gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


async def started(run: Inside, path: Path) -> list[int]:
    """The program's process and its child's, once both are there."""
    await run.when(lambda: len(pids_in(path)) == 2)
    return pids_in(path)


async def test_a_program_in_a_worker_is_recorded_as_one_that_runs_inline(tmp_path: Path) -> None:
    gateway = Gateway(GatewaySection(), byte_tokenizer(), "policy")
    here = Inside(Program(), Limits(), Engine("hi"), gateway)
    try:
        inline = await here.roll_out(1, index=2)
    finally:
        await gateway.close()
    async with inside(tmp_path, "Program", engine=Engine("hi"), gateway={}) as there:
        remote = await there.roll_out(1, index=2)
        assert (remote.outcome.ending, remote.reward, remote.info["last"]) == ("completed", 4.0, "hi")
        assert [turn.extends for turn in remote.turns] == [False, True]
        assert told(remote) == told(inline)
        assert there.gate.granted == here.gate.granted == 2


async def test_many_programs_of_two_workers_are_served_side_by_side(tmp_path: Path) -> None:
    async with inside(tmp_path, "Program", engine=Engine("yes", 0.1), gateway={}, count=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, index=m) for m in range(8)))
        assert {(r.outcome.ending, r.reward, len(r.turns)) for r in ended} == {("completed", 6.0, 2)}
        assert [r.messages[0].content for r in ended] == [f"task {n}" for n in range(8)]


@pytest.mark.skipif(sys.platform != "linux", reason="what a killed process started is found in /proc")
async def test_what_a_program_has_left_is_scored_at_a_deadline_and_it_ends_with_all_its_children(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pids"
    limits = {"deadline_s": 15.0}
    async with inside(tmp_path, "Program", {"pids": str(path)}, limits=limits, gateway={}) as run:
        pending = asyncio.create_task(run.roll_out())
        program, _ = await started(run, path)
        rollout = await pending
        assert (rollout.outcome.ending, rollout.outcome.cause, rollout.reward) == (
            "truncated",
            "deadline",
            10.0,
        )
        assert rollout.info["last"] == "hello"
        gone([program], 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="what a killed process started is found in /proc")
async def test_programs_of_a_worker_that_is_killed_end_and_cost_a_retry(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    async with inside(tmp_path, "Program", {"pids": str(path)}, gateway={}) as run:
        pending = asyncio.create_task(run.roll_out())
        pids = await started(run, path)
        (worker,) = run.pool.workers
        os.kill(worker.link.child.pid, signal.SIGKILL)
        rollout = await pending
        assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "infrastructure")
        assert len(rollout.turns) == 2  # what it had sampled is kept
        await asyncio.to_thread(gone, pids, 10.0)


ORCHESTRATOR = """
import sys
sys.path.insert(0, sys.argv[1])
from worker_envs import Program
from paceline.testing import play
play(Program(sys.argv[2]), ["one", "two"], serve=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a killed process started is found in /proc")
def test_programs_end_with_the_process_that_is_killed_that_runs_them_inline(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    process = subprocess.Popen([sys.executable, "-c", ORCHESTRATOR, str(HERE), str(path)])
    try:
        deadline = time.monotonic() + 60
        while len(pids_in(path)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        pids = pids_in(path)
        assert all(map(psutil.pid_exists, pids))
    finally:
        process.kill()
        process.wait()
    gone(pids, 10.0)


KILLS_ITS_GROUP = """
import os, signal, subprocess, sys
from paceline.envs.orphans import marked
nothing = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
program = subprocess.Popen(["sleep", "600"], env={**os.environ, **marked()}, start_new_session=True, **nothing)
print(program.pid, flush=True)
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a killed process started is found in /proc")
def test_programs_end_also_where_the_whole_group_is_killed_before_the_watcher_has_begun() -> None:
    """Ray ends the process group of an actor that dies; the watcher needs longer to begin than this does to be killed."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLS_ITS_GROUP], capture_output=True, text=True, start_new_session=True
    )
    assert ended.returncode == -signal.SIGKILL
    gone([int(ended.stdout)], 10.0)


async def test_without_a_gateway_it_says_so(tmp_path: Path) -> None:
    async with inside(tmp_path, "Program") as run:
        rollout = await run.roll_out()
        assert rollout.outcome.cause == "environment"
        assert "cannot serve a program" in rollout.outcome.detail


async def test_a_gateway_that_the_workers_host_cannot_reach_is_named_with_what_to_set(tmp_path: Path) -> None:
    away = {"public_url": "http://127.0.0.1:9"}
    async with inside(tmp_path, "Program", gateway=away) as run:
        rollout = await run.roll_out()
        assert rollout.outcome.cause == "environment"
        assert "127.0.0.1:9 cannot be reached" in rollout.outcome.detail
        assert "gateway.public_url" in rollout.outcome.detail
