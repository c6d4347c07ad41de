"""Code of an environment that reaches for what is not its own: the run tells the cause and ends, or goes on; it never
hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_kit import CommandLine

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("stop the loop", "is not for code that runs in the loop"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_what_it_raises_fails_its_rollouts_with_the_cause(tmp_path: Path, does: str, told: str) -> None:
    run = CommandLine(
        tmp_path, env__0__id="e2e_envs:Intruder", env__0__args__does=does, batch__dead_group_limit=1
    )
    assert run.end(within_s=120) == 1
    assert run.status.status == "failed"
    assert "2 groups in a row brought nothing to train" in run.status.reason
    assert told in run.status.reason
    assert "e2e_envs.py:" in run.status.reason
    assert "Traceback" not in run.said


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("cancel everything", "the run's own task was cancelled by code that runs in this process"),
        ("exit in a task", "SystemExit: 3 (e2e_envs.py:"),
        ("cancel the shipper", "the batch shipper failed: CancelledError"),
    ],
)
def test_what_reaches_the_run_itself_ends_it_with_the_cause(tmp_path: Path, does: str, told: str) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Intruder", env__0__args__does=does)
    assert run.end(within_s=120) == 1
    assert (run.status.status, run.status.exit_code) == ("failed", 1)
    assert told in run.status.reason
    assert told in run.said
    if "task" in told or "Exit" in told:
        assert "e2e_envs:Intruder" in run.status.reason


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("leave a task", "_stays) did not stop within 8 s, and was cut off"),
        ("leave a thread", "have left did not end within 8 s, and were cut off: sleeper"),
    ],
)
def test_what_it_leaves_behind_does_not_keep_a_run_that_is_done(tmp_path: Path, does: str, told: str) -> None:
    run = CommandLine(tmp_path, env__0__id="e2e_envs:Intruder", env__0__args__does=does, run__max_steps=1)
    assert run.end(within_s=240) == 0
    assert (run.status.status, run.status.exit_code) == ("done", 0)
    assert "warning: " in run.said
    assert told in run.said
