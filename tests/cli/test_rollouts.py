"""`paceline rollouts` lists what a run's journal holds, and shows one rollout with its tokens; nothing unescaped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.cli.main import main
from paceline.domain import events as on
from paceline.domain.rollout import Message
from paceline.journal import FileJournal, read_rollouts
from paceline.testing import Trace, World, chaos, setup_for, train_env

SETUP = setup_for(train_env("a", tasks=9, group_size=3, max_attempts=2), batch=6, max_steps=4)
HOSTILE = "look\x1b[2J\x07"


@pytest.fixture
def recorded(tmp_path: Path) -> Trace:
    """A run in `tmp_path` whose messages hold control characters."""
    return record(tmp_path)


def record(run_dir: Path, **options: Any) -> Trace:
    trace = World(SETUP, chaos(2, failures=0.4), cap=6).run()

    async def write() -> None:
        journal = FileJournal(run_dir, "run", **options)
        for at, event, commands in trace.journal:
            if isinstance(event, on.RolloutEnded):
                said = (Message("user", "hello"), Message("assistant", HOSTILE))
                event = on.RolloutEnded(msgspec.structs.replace(event.rollout, messages=said))
            journal.append(at, event, tuple(commands))
            if options:
                await journal.flush()
        await journal.close()

    asyncio.run(write())
    return trace


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["rollouts", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rollouts_are_filtered_sorted_and_cut(
    tmp_path: Path, recorded: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path)
    assert len(listed(capsys, run)) == len(recorded.ended)
    shipped = {str(rollout) for rollout in recorded.batches[1].rollouts}
    assert {row["rollout"] for row in listed(capsys, run, "--step", "2")} == shipped
    failed = [r for r in recorded.ended if r.outcome.ending == "failed"]
    assert len(listed(capsys, run, "--ending", "failed")) == len(failed) > 0
    rewards = [
        row["reward"] for row in listed(capsys, run, "--reward", "0.1..", "--sort", "reward", "--reverse")
    ]
    expected = sorted(
        [r.reward for r in recorded.ended if r.reward is not None and r.reward >= 0.1], reverse=True
    )
    assert rewards == expected
    assert len(listed(capsys, run, "--limit", "3")) == 3
    assert main(["rollouts", run, "--env", "b"]) == 2
    assert "no rollout of an environment 'b'; there are " in capsys.readouterr().err
    assert main(["rollouts", run, "--fate", "trained"]) == 2
    assert "zero_signal" in capsys.readouterr().err
    by_version = listed(capsys, run, "--version", "1")
    assert len(by_version) == sum(
        r.oldest_version is not None and r.oldest_version <= 1 <= (r.newest_version or 0)
        for r in recorded.ended
    )
    assert main(["rollouts", run]) == 0
    out = capsys.readouterr().out
    assert f"{len(recorded.ended)} of {len(recorded.ended)} rollouts" in out


def test_one_is_shown_whole_and_escaped(
    tmp_path: Path, recorded: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rollout = str(tmp_path), recorded.batches[0].rollouts[0]
    assert main(["rollouts", run, str(rollout), "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J\\x07" in out
    assert "[assistant]" in out
    assert "shipped" in out
    assert "trainable    -0.5000  v0" in out
    (one,) = listed(capsys, run, str(rollout))
    assert one["messages"][1]["content"] == HOSTILE  # type: ignore[index]
    turn = one["turn_details"][0]  # type: ignore[index]
    assert turn["trainable"] == [False] * len(turn["prompt_ids"]) + [True] * len(turn["logprobs"])
    assert one["fate"] == "shipped"
    assert one["advantage"] is not None


def test_what_is_not_there_is_said(
    tmp_path: Path, recorded: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", str(tmp_path), "g999.m0.a0"]) == 2
    assert "g999.m0.a0" in capsys.readouterr().err
    assert main(["rollouts", str(tmp_path), "best"]) == 2
    assert main(["rollouts", str(tmp_path), "--reward", "high"]) == 2


def test_what_retention_dropped_is_said_where_it_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, run = record(tmp_path, keep_steps=0, file_bytes=1), str(tmp_path)
    first, last = str(trace.ended[0].id), str(trace.ended[-1].id)
    dropped = len(trace.ended) - len(list(read_rollouts(tmp_path)))
    assert 0 < dropped < len(trace.ended)
    assert main(["rollouts", run]) == 0
    out = capsys.readouterr().out
    assert f"{len(trace.ended)} of {len(trace.ended)} rollouts" in out
    assert f"dropped tokens, messages and info of the {dropped} that ended first" in out
    # One of them is told as far as the log goes; one that is kept, whole.
    assert main(["rollouts", run, first]) == 0
    out = capsys.readouterr().out
    assert first in out
    assert "dropped tokens, messages and info of it" in out
    (one,) = listed(capsys, run, first)
    assert "dropped" in one
    (one,) = listed(capsys, run, last)
    assert one["messages"]
    assert main(["explain", run, first]) == 0
    assert "dropped tokens, messages and info of 1 of these rollouts" in capsys.readouterr().out
    assert main(["explain", run, last]) == 0
    assert "dropped" not in capsys.readouterr().out
    assert main(["report", run]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "dropped tokens, messages and info of it" in page
    assert "events " in page
    assert " free" in page


def test_what_is_gone_without_retention_is_an_error(
    tmp_path: Path, recorded: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "rollouts").iterdir():
        path.unlink()
    assert main(["rollouts", str(tmp_path), str(recorded.ended[0].id)]) == 2
    assert "not in the rollout store: restore its files" in capsys.readouterr().err
