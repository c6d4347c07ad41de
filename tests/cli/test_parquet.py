"""`paceline export --parquet`: what is written opens in pyarrow, and holds what the journal and the store do."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.journal import FileJournal, read_rollouts
from paceline.testing import World, chaos, setup_for, train_env


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    setup = setup_for(train_env("a", tasks=9, group_size=3, max_attempts=2), batch=6, max_steps=4)
    trace = World(setup, chaos(2, failures=0.4), cap=6).run()

    async def write() -> None:
        journal = FileJournal(tmp_path / "run", "run")
        for at, event, commands in trace.journal:
            journal.append(at, event, tuple(commands))
        await journal.close()

    asyncio.run(write())
    return tmp_path / "run"


def test_rollouts_and_turns_open_in_pyarrow(run_dir: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip(
        "pyarrow.parquet", reason="needs the parquet extra: pip install 'paceline[parquet]'"
    )
    assert main(["export", str(run_dir), "--parquet", str(tmp_path / "out")]) == 0
    rollouts = pq.read_table(tmp_path / "out" / "rollouts.parquet").to_pylist()
    turns = pq.read_table(tmp_path / "out" / "turns.parquet").to_pylist()
    stored = {str(rollout.id): rollout for rollout in read_rollouts(run_dir)}
    assert {row["rollout"] for row in rollouts} == set(stored)
    assert sum(row["fate"] == "shipped" for row in rollouts) == 24
    assert len(turns) == sum(len(rollout.turns) for rollout in stored.values()) > 0
    for row in turns:
        turn = stored[row["rollout"]].turns[row["turn"]]
        assert row["sampled_ids"] == turn.sampled_ids.tolist()
        assert row["prompt_ids"] == turn.prompt_ids.tolist()
        assert row["logprobs"] == turn.logprobs.tolist()
        assert len(row["versions"]) == len(row["sampled_ids"])


def test_without_pyarrow_the_extra_is_named(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(run_dir), "--parquet", str(tmp_path / "out")]) == 2
    assert "pip install 'paceline[parquet]'" in capsys.readouterr().err
