"""`paceline explain` tells the life of a rollout in order, and of nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.cli.explain import subject_of
from paceline.cli.main import main
from paceline.domain import commands as do
from paceline.errors import ConfigError
from paceline.journal import FileJournal
from paceline.testing import World, chaos, setup_for, train_env


def test_a_rollout_a_group_a_task_and_a_step_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = setup_for(train_env("a", tasks=9, group_size=3, max_attempts=2), batch=6, max_steps=4)
    trace = World(setup, chaos(2, failures=0.6), cap=6).run()

    async def write() -> None:
        journal = FileJournal(tmp_path, "run")
        for at, event, commands in trace.journal:
            journal.append(at, event, commands)
        await journal.close()

    asyncio.run(write())
    shipped = trace.batches[0].rollouts[0]
    assert main(["explain", str(tmp_path), str(shipped)]) == 0
    told = capsys.readouterr().out
    parts = ["was started on", "asked for a model call", "was let through", "reward", "was judged queued"]
    places = [told.index(part) for part in [*parts, "went into batch 1"]]
    assert places == sorted(places)
    retried = trace.commands(do.NoteRetry)[0].rollout
    assert main(["explain", str(tmp_path), f"g{retried.group}"]) == 0
    assert f"{retried} is tried again" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "step2"]) == 0
    assert "batch 2 was cut: 6 rollouts" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "a/3"]) == 0
    assert "a task 3" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "g99999"]) == 2


def test_what_is_none_of_the_forms_is_refused_with_the_forms() -> None:
    with pytest.raises(ConfigError, match=r"g12\.m3\.a0"):
        subject_of("the first one")
