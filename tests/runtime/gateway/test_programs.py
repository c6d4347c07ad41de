"""Unmodified SDKs and an agent framework, each in a process of its own, against the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_kit import CALL, TEMPLATE

from paceline.config import Limits
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.task import Task, TaskRef
from paceline.envs import Context
from paceline.envs.endpoint import Endpoint
from paceline.envs.program import ProgramEnv, ProgramRun
from paceline.testing import play
from paceline.testing.tokens import byte_tokenizer

HERE = Path(__file__).parent


class Runs(ProgramEnv):
    """Runs one of the programs beside this file; its output is its reward's reason."""

    def score(self, data: Any, run: ProgramRun) -> Any:
        self.run = run
        return 1.0 if run.exit_code == 0 else 0.0


def run(program: str, answers: Any, **more: Any) -> tuple[Rollout, ProgramRun]:
    env = Runs(command=[sys.executable, str(HERE / program)], tasks=[{}])
    rollout = play(env, answers, serve=True, tokenizer=byte_tokenizer(TEMPLATE), max_tokens=256, **more)
    assert rollout.outcome.ending == "completed", (rollout.outcome, getattr(env, "run", None))
    return rollout, env.run


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: it is NOT covered")


def test_the_openai_sdk_runs_unmodified() -> None:
    needs("openai")
    said = [CALL, "it is blue", "str", CALL, "hi", "ho", CALL, "upon a time"]
    rollout, done = run("agent_openai.py", said)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "chat: it is blue",
        "stream: str",
        "async: look",
        "response: hi",
        "next: ho",
        'responses stream: function_call look {"at": "sky"}',
        "completion: upon a time",
        "models: scripted",
    ]
    assert [turn.extends for turn in rollout.turns] == [False, True, False, False, False, True, False, False]
    tokenizer = byte_tokenizer()
    assert [tokenizer.decode(turn.sampled_ids) for turn in rollout.turns] == said


def test_the_anthropic_sdk_runs_unmodified() -> None:
    needs("anthropic")
    rollout, done = run("agent_anthropic.py", [CALL, "it is blue", CALL])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "stream: it is blue",
        "stop: end_turn 11",
        "call: look {'at': 'sky'}",
        "count: True",
    ]
    assert [turn.extends for turn in rollout.turns] == [False, True, False]


def test_a_pydantic_ai_agent_runs_unmodified() -> None:
    needs("pydantic_ai")
    rollout, done = run("agent_pydantic.py", [CALL, "it is blue"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "agent: it is blue"
    assert [turn.extends for turn in rollout.turns] == [False, True]


def test_a_program_that_fails_is_scored_and_one_that_asks_nothing_fails_its_rollout(tmp_path: Path) -> None:
    env = Runs(command=[sys.executable, "-c", "raise SystemExit('no {what}')"], tasks=[{"what": "luck"}])
    rollout = play(env, [], serve=True)
    assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "environment")
    assert "no luck" in rollout.outcome.detail
    rollout = play(Runs(command=["/nowhere/agent"], tasks=[{}]), [], serve=True)
    assert "cannot start '/nowhere/agent'" in rollout.outcome.detail


def test_s79_a_program_and_its_children_end_at_the_deadline_and_what_they_left_is_scored(
    tmp_path: Path,
) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "open('left.txt', 'w').write('half done')\n"
        "time.sleep(60)\n"
    )

    class Left(Runs):
        def score(self, data: Any, run: ProgramRun) -> Any:
            self.run = run
            return 0.25 if (run.folder / "left.txt").read_text() == "half done" else 0.0

    env = Left(command=[sys.executable, "-c", script], tasks=[{}])
    began = time.monotonic()
    rollout = play(env, [], serve=True, limits=Limits(deadline_s=2.0))
    assert time.monotonic() - began < 10
    assert (rollout.outcome.ending, rollout.outcome.cause, rollout.reward) == ("truncated", "deadline", 0.25)
    assert not env.run.folder.exists()
    for pid in (tmp_path / "pids").read_text().split():
        assert not _runs(int(pid)), pid


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not state.stdout.strip().startswith("Z") and state.stdout.strip() != ""


ASKS = """
import json, os, urllib.request
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)).read()
"""


def test_a_server_that_a_program_leaves_in_the_background_does_not_hold_its_end_up(tmp_path: Path) -> None:
    """It holds the program's output open; the rollout was cut at its deadline, and scored as that."""
    pid = tmp_path / "pid"
    shell = f"{sys.executable} -c '{ASKS}'; sleep 600 & echo $! >{pid}; echo said"
    env = Runs(command=["sh", "-c", shell], tasks=[{}])
    rollout = play(env, ["a"], serve=True, tokenizer=byte_tokenizer(TEMPLATE), limits=Limits(deadline_s=60.0))
    assert (rollout.outcome.ending, rollout.reward) == ("completed", 1.0)
    assert env.run.exit_code == 0
    assert env.run.output == "said\n"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


def test_the_folder_of_a_program_whose_rollout_nobody_wants_any_more_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a limit ends is scored by what it left; a run that cancels stale rollouts left a folder of each."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Serves:
        last = None

        @contextlib.asynccontextmanager
        async def serve(self) -> AsyncIterator[Endpoint]:
            yield Endpoint("http://127.0.0.1:1/x", "secret")

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()
        ctx = Context(
            RolloutId(0, 0, 0), group_seed=1, noise_seed=1, deadline=loop.time() + 60, clock=loop.time
        )
        env = Runs(command=["sleep", "600"], tasks=[{}])
        running = asyncio.create_task(env.rollout(Task(TaskRef("e", "train", 0, 0), {}), Serves(), ctx))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert os.listdir(tmp_path), "a limit may have ended it: what it left can still be scored"

    asyncio.run(cancelled())
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_a_task_says_in_braces_is_no_name_of_another_part() -> None:
    env = Runs(command=["{question}", "{answer}", "{other}", "{}"], tasks=[{}])
    command = env.command({"question": "what is {answer}?", "answer": "42"}, Path())
    assert command == ["what is {answer}?", "42", "{other}", "{}"]
