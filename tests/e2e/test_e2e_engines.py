"""Engines that come and go while a run goes on."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest
from e2e_kit import MODEL, CommandLine, records

from paceline.cli.engine_list import read_list
from paceline.cli.main import main
from paceline.domain import events as on
from paceline.runtime.processes import ChildProcess
from paceline.tokens.tokenizer import resolve_model_dir
from paceline.transport.layout import ACKS, steps_in

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


async def serve(log: Path) -> ChildProcess:
    command = [sys.executable, "-m", "paceline.engines.embedded", "--kv-tokens", "4096"]
    command += ["--model", str(resolve_model_dir(MODEL))]
    return await ChildProcess.start(command, name=log.stem, log_path=log, start_s=120.0)


def trained(run: CommandLine) -> int:
    return (steps_in(run.run_dir / ACKS) or [0])[-1]


async def test_an_engine_is_added_and_the_first_taken_out_and_nothing_is_lost(tmp_path: Path) -> None:
    async with await serve(tmp_path / "a.log") as a, await serve(tmp_path / "b.log") as b:
        urls = a.ready["url"], b.ready["url"]
        run = CommandLine(
            tmp_path,
            engine__type="vllm",
            engine__urls=[urls[0]],
            trainer__start_s=300.0,
            admission__cap=8,
            run__max_steps=40,
        )
        await asyncio.to_thread(run.when, lambda: trained(run) >= 1, 240.0)
        assert read_list(run.run_dir) == (urls[0],)
        assert main(["engines", str(run.run_dir), "--add", urls[1]]) == 0
        await asyncio.to_thread(run.when, lambda: "vllm-1 joined" in run.said, 240.0)
        await asyncio.to_thread(run.when, lambda: trained(run) >= 3, 240.0)
        assert main(["engines", str(run.run_dir), "--remove", urls[0]]) == 0
        await asyncio.to_thread(run.when, lambda: "vllm-0 leaves" in run.said, 240.0)
        assert await asyncio.to_thread(run.end, 300.0) == 0, run.said
        assert run.summary["tokens_conserved"]
        assert (run.status.status, run.summary["steps"]) == ("done", 40)
    seen = [record.event for record in records(run.run_dir)]
    left = next(i for i, e in enumerate(seen) if isinstance(e, on.EngineLost) and e.leaves)
    joined = next(i for i, e in enumerate(seen) if isinstance(e, on.EngineJoined) and e.info.id == "vllm-1")
    loaded = next(i for i, e in enumerate(seen) if isinstance(e, on.WeightsLoaded) and e.engine == "vllm-1")
    calls = [(i, e) for i, e in enumerate(seen) if isinstance(e, on.SegmentEnded)]
    assert not [e for _, e in calls if e.error is not None], "nothing failed for it"
    first = next(i for i, e in calls if e.engine == "vllm-1")
    assert joined < loaded < first, "it came with base weights, and got work when it had the current ones"
    by_engine = Counter(e.engine for i, e in calls if i > left)
    assert by_engine["vllm-1"] > 10 * by_engine["vllm-0"], "only what was under way came back from the first"
    failed = [e for e in seen if isinstance(e, on.RolloutEnded) and e.rollout.outcome.ending == "failed"]
    assert not failed


def test_the_list_refuses_what_is_no_address_and_never_becomes_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engines", str(tmp_path)]) == 2
    assert "has no engines.txt" in capsys.readouterr().err
    (tmp_path / "engines.txt").write_text("# mine\nhttp://gpu-0:8000/  # the first\n\nhttp://gpu-1:8000\n")
    assert main(["engines", str(tmp_path), "--remove", "http://gpu-0:8000"]) == 0
    assert capsys.readouterr().out == "http://gpu-1:8000\n"
    assert main(["engines", str(tmp_path), "--remove", "http://gpu-1:8000"]) == 2
    assert "without an engine" in capsys.readouterr().err
    assert main(["engines", str(tmp_path), "--remove", "http://gpu-9:8000"]) == 2
    assert "does not use it; it uses http://gpu-1:8000" in capsys.readouterr().err
    assert main(["engines", str(tmp_path), "--add", "gpu-2"]) == 2
    assert "'gpu-2' is no address" in capsys.readouterr().err
    assert main(["engines", str(tmp_path), "--add", "http://me:secret@gpu-2:8000"]) == 2
    assert "secret" not in capsys.readouterr().err
    assert read_list(tmp_path) == ("http://gpu-1:8000",)
