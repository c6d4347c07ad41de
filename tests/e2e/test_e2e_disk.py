"""What a killed run had on disk, and what becomes of one whose disk has no room."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from e2e_kit import CommandLine, events, numbers, records
from test_e2e_stop import resume

from paceline.domain import events as on
from paceline.journal import dropped_before
from paceline.journal.files import file_numbers

pytestmark = pytest.mark.torch

ONE_AT_A_TIME = {
    "run__max_steps": 1000,
    "admission__cap": 1,
    "batch__rollouts": 64,  # none is cut, which would make everything durable
    "env__0__id": "e2e_envs:Witnessed",
}


def seen(told: Path) -> list[str]:
    """Rollouts that began, as somebody outside of the run was told."""
    return told.read_text().split() if told.exists() else []


def test_a_run_whose_directory_is_removed_has_failed_and_says_why(tmp_path: Path) -> None:
    """It had said that it was done, with 0, and had nothing but a status to show for it."""
    run = CommandLine(tmp_path, run__max_steps=1000)
    run.when_trained(1)
    shutil.rmtree(run.run_dir, ignore_errors=True)  # what the trainer writes meanwhile may stay
    assert run.end(within_s=60) == 1
    assert "removed while" in run.said
    assert "Traceback" not in run.said


def finishes(root: Path, steps: int, **options: object) -> CommandLine:
    """Resume, and let it finish, with the patience that a busy machine wants."""
    run = resume(root, run__max_steps=steps, **options)
    assert run.end(within_s=240) == 0, run.said
    assert (run.status.status, run.summary["steps"]) == ("done", steps)
    assert run.summary["tokens_conserved"]
    return run


def ended(run_dir: Path) -> list[str]:
    return [str(event.rollout.id) for event in events(run_dir, on.RolloutEnded)]


def test_without_a_window_nothing_is_lost_of_what_was_seen_to_have_ended(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    options = ONE_AT_A_TIME | {"journal__fsync_s": 0, "env__0__args__told": str(told)}
    run = CommandLine(tmp_path, **options)
    for kill in (9, 18, 31):
        run.when(partial(lambda upto: len(seen(told)) >= upto, kill), within_s=240)
        run.process.kill()
        run.process.wait()
        began = seen(told)
        # With one permit, whoever begins shows that all before it have ended.
        assert set(began[:-1]) <= set(ended(run.run_dir))
        run = resume(tmp_path, **options)
    run.when_opened()
    run.process.kill()
    run.process.wait()
    del options["run__max_steps"]
    finishes(tmp_path, 1, **options | {"batch__rollouts": 16, "admission__cap": 32})


def test_within_the_window_what_was_seen_to_have_ended_may_be_lost(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    run = CommandLine(tmp_path, **ONE_AT_A_TIME, journal__fsync_s=60, env__0__args__told=str(told))
    run.when(lambda: len(seen(told)) >= 9, within_s=240)
    run.process.kill()
    run.process.wait()
    assert not file_numbers(run.run_dir, "log"), "nothing was committed"


@pytest.mark.demo
def test_a_run_keeps_its_rollout_store_within_the_bound_and_goes_on(tmp_path: Path) -> None:
    bounded = {"journal__keep_token_mb": 0.02}
    run = CommandLine(tmp_path, run__max_steps=1000, **bounded)
    seen_bytes = []

    def grown() -> bool:
        store = run.run_dir / "rollouts"
        files = list(store.iterdir()) if store.is_dir() else []
        with contextlib.suppress(FileNotFoundError):  # dropped a moment ago
            seen_bytes.append(sum(path.stat().st_size for path in files))
        return dropped_before(run.run_dir) > 0 and len(events(run.run_dir, on.RolloutEnded)) > 600

    run.when(grown, within_s=240)
    run.process.kill()
    run.process.wait()
    step = max(numbers(run.run_dir)[0])
    again = finishes(tmp_path, step + 5, **bounded)
    # An eighth more for the file that is written, and what a commit of 0.2 s brings at once.
    assert max(seen_bytes) < 30_000
    assert again.summary["disk"]["tokens"] < 30_000 < again.summary["disk"]["events"]
    assert "disk: " in again.said


@pytest.fixture
def small_disk(small_file_system: Callable[[str], Path]) -> Path:
    """Large enough for a few versions of the small policy."""
    return small_file_system("600m")


def fill(disk: Path) -> Path:
    """A file of somebody else that takes all that is left."""
    other = disk / "other"
    with other.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return other


@pytest.mark.demo
def test_a_full_disk_holds_the_run_until_there_is_room_and_ends_it_when_there_never_is(
    small_disk: Path,
) -> None:
    options = {"checkpoint__keep_last": 1, "journal__full_disk_s": 20}
    run = CommandLine(small_disk, run__max_steps=1000, **options)
    run.when_trained(2)
    other = fill(small_disk)
    run.when(lambda: "held: " in run.said)
    # Whoever is first to find none: the journal, or the trainer's weights or checkpoint.
    assert re.search(r"held: .*No space left on device.*; nothing new starts", run.said), run.said
    time.sleep(3)
    trained = numbers(run.run_dir)[1]
    time.sleep(2)
    assert numbers(run.run_dir)[1] == trained, "it is held"
    other.unlink()
    run.when(lambda: "the run goes on" in run.said)
    run.when_trained(trained[-1] + 4)
    other = fill(small_disk)
    # What is left is enough for whatever is small: only the trainer's versions find no room.
    os.truncate(other, other.stat().st_size - 2 * 2**20)
    assert run.end(within_s=120) == 1, run.said
    assert "held: the trainer's " in run.said, run.said
    assert "could not be written for 20 s" in run.said
    assert "No space left on device" in run.said
    other.unlink()
    finishes(small_disk, max(numbers(run.run_dir)[0]) + 2, **options)
    kinds = [type(record.event) for record in records(run.run_dir)]
    assert kinds.count(on.RunHeld) >= 2
