"""OpenEnv's wire, against a real OpenEnv server in an interpreter that has it; ours needs none of its packages."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_kit import interpreter, three_steps

from paceline.config import EnvSection, Limits
from paceline.envs import make_environment
from paceline.envs.surroundings import InRun

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    python = interpreter("openenv", "openenv")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([python, str(script), str(port)])
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


async def test_sessions_run_side_by_side_and_a_seed_is_the_groups(server: int) -> None:
    from worker_kit import Engine, Inside

    url = f"ws://127.0.0.1:{server}/ws"
    section = EnvSection.model_validate({"id": "openenv", "args": {"url": url, "observation": "hint"}})
    env = make_environment(section.id, section.args)
    env.bind(InRun(4))
    try:
        run = Inside(env, Limits(), Engine("8"))
        ended = await asyncio.gather(*(run.roll_out(m, group=g) for g in range(6) for m in range(2)))
        assert {r.outcome.ending for r in ended} == {"completed"}, [r.outcome for r in ended]
        for first, second in zip(ended[::2], ended[1::2], strict=True):
            assert [m.content for m in first.messages] == [m.content for m in second.messages]
        assert all(r.messages[0].content == "Guess: 1 to 15" for r in ended)
        assert {r.reward for r in ended} == {
            0.0,
            1.0,
        }  # the seed of one group hides 8, those of others do not
        assert {len(r.turns) for r in ended} <= {1, 4}
        cut = await Inside(env, Limits(max_turns=2), Engine("0")).roll_out()
        assert (cut.outcome.cause, cut.reward) == ("turns", 0.0)
    finally:
        await env.close()


async def test_a_server_that_is_not_there_is_tried_again() -> None:
    from worker_kit import Engine, Inside

    env = make_environment("openenv", {"url": "ws://127.0.0.1:9/ws"})
    try:
        rollout = await Inside(env, Limits(), Engine()).roll_out()
        assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "infrastructure")
    finally:
        await env.close()


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", ["inline", "process"])
def test_three_steps_are_trained_on_a_server(server: int, tmp_path: Path, workers: str) -> None:
    pytest.importorskip("torch")
    from paceline import run

    args = {"url": f"ws://127.0.0.1:{server}/ws", "observation": "hint"}
    section = {"id": "openenv", "args": args, "group_size": 4, "workers": {"type": workers}}
    limits = {"max_turns": 4, "max_context": 500}
    summary = run(three_steps(tmp_path, section | {"limits": limits}))
    assert (summary["status"], summary["steps"]) == ("done", 3), summary
