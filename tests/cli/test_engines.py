"""Engines that the command line starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.engines import RunEngines
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.errors import EngineError
from paceline.runtime.processes import ChildProcess

CONFIG = ["--model.name=pkg:paceline/assets/small_policy", "--env.0.id=reverse-text"]


async def test_an_engine_whose_restart_dies_at_once_may_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(RunConfig, [], CONFIG).value
    children: list[ChildProcess] = []
    engines = RunEngines(config, tmp_path, children, ())
    name = engines._name(0)
    first = await ChildProcess.start(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        name="e",
        log_path=tmp_path / "e.log",
        ready=None,
    )
    children.append(first)
    engines._processes[name] = first
    # A program that ends before it is ready.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):
        await engines._close_process(0)
        with pytest.raises(EngineError):
            await engines._start_process(config.engine, 0, 0, tmp_path)  # type: ignore[arg-type]
    assert children == []
    assert first.exit_code is not None
