"""A whole run that loses its only vLLM in the middle, and gets another at the same address."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_kit import ROOT, URL, VLLM, free_port, serving

from paceline.transport.layout import ACKS, steps_in

pytestmark = pytest.mark.skipif(
    bool(URL) and not VLLM, reason="starts servers of its own: run `make test-vllm`"
)
STEPS = 6


async def steps_of(run_dir: Path, at_least: int, process: asyncio.subprocess.Process) -> None:
    while (steps_in(run_dir / ACKS) or [0])[-1] < at_least:
        assert process.returncode is None, "the run has ended"
        await asyncio.sleep(0.1)


@pytest.mark.timeout(600)
async def test_a_server_killed_in_the_middle_of_a_run_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    port = free_port()
    words = [f'--engine.urls=["http://127.0.0.1:{port}"]', f"--run.dir={tmp_path}", "--run.name=t"]
    words += [f"--run.max_steps={STEPS}", "--plain", "--summary=json"]
    config = ROOT / "examples" / "reverse-text" / "vllm.toml"
    options = ("--max-model-len", "512")
    with ExitStack() as stack:
        first = await asyncio.to_thread(
            stack.enter_context, serving(tmp_path / "first.log", *options, port=port)
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline", "run", str(config), *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said = asyncio.ensure_future(process.communicate())
            async with asyncio.timeout(120):
                await steps_of(tmp_path / "t", 2, process)
            first.kill()
            await asyncio.to_thread(
                stack.enter_context, serving(tmp_path / "second.log", *options, port=port)
            )
            out, err = await said
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, err.decode()[-4000:]
    report = json.loads(out.decode().splitlines()[-1])
    assert (report["status"], report["steps"], report["tokens_conserved"]) == ("done", STEPS, True)
    assert report["staleness_max"] <= 4
    second = (tmp_path / "second.log").read_text(errors="replace")
    # It came with the model's own weights, and was given the current ones before a rollout was sent to it: until then
    # it had heard the three requests of the start-up probe.
    before, loaded, _ = second.partition('"POST /collective_rpc')
    assert loaded
    assert before.count('"POST /inference/v1/generate') == 3
