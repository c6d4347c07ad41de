"""The final status of a run: always written, once, and in agreement with the exit code."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.cli.status import StatusFile, describe
from paceline.cli.status import how_it_stands as read_status
from paceline.errors import ConfigError, EngineError, NoProgressError, WireError
from paceline.transport import layout


@pytest.mark.parametrize("where", ["set-up", "step 3", "during save", "during finalise"])
def test_s81_a_failure_anywhere_is_the_final_status_with_its_reason(where: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), StatusFile(tmp_path) as status:  # noqa: PT012
        assert read_status(tmp_path).status == "running"
        raise RuntimeError(f"failed at {where}")
    written = read_status(tmp_path)
    assert (written.status, written.exit_code) == ("failed", 1)
    assert written.reason == f"RuntimeError: failed at {where}"
    assert status.status == written


def test_s81_success_and_a_stop_exit_with_zero(tmp_path: Path) -> None:
    for state in ("done", "stopped"):
        with StatusFile(tmp_path) as status:
            assert status.finish(state, "because") == 0  # type: ignore[arg-type]
        assert (read_status(tmp_path).status, read_status(tmp_path).exit_code) == (state, 0)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
def test_s81_an_interrupt_is_a_stop(interrupt: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(interrupt), StatusFile(tmp_path):
        raise interrupt
    assert (read_status(tmp_path).status, read_status(tmp_path).exit_code) == ("stopped", 130)


def test_s81_the_first_final_status_stands(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="late"), StatusFile(tmp_path) as status:  # noqa: PT012
        assert status.finish("failed", "the trainer died") == 1
        assert status.finish("done", "all steps") == 1
        raise OSError("late")
    assert read_status(tmp_path).reason == "the trainer died"


@pytest.mark.parametrize("way", ["fail", "finish"])
def test_a_reason_that_quotes_what_is_no_text_is_kept_with_escapes(way: str, tmp_path: Path) -> None:
    status = StatusFile(tmp_path)
    said = "score() raised \ud800\x1b]0;title\x07"
    code = status.fail(NoProgressError(said)) if way == "fail" else status.finish("failed", said)
    assert (code, read_status(tmp_path)) == (1, status.status)
    assert status.status.reason == r"score() raised \ud800\x1b]0;title\x07"


def test_the_final_status_tells_the_steps_taken_beside_those_asked_for(tmp_path: Path) -> None:
    taken = 12
    status = StatusFile(tmp_path, steps=60, trained=lambda: taken)
    assert (read_status(tmp_path).steps, read_status(tmp_path).trained) == (60, None)
    taken = 13
    status.finish("stopped", "SIGTERM")
    assert (read_status(tmp_path).steps, read_status(tmp_path).trained) == (60, 13)


def test_a_run_that_ends_without_a_word_has_failed(tmp_path: Path) -> None:
    with StatusFile(tmp_path):
        pass
    assert read_status(tmp_path).status == "failed"


def test_a_config_error_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    assert StatusFile(tmp_path).fail(ExceptionGroup("tasks", [ConfigError("env.id is unknown")])) == 2
    assert read_status(tmp_path).reason == "env.id is unknown"


def test_a_killed_run_is_read_as_failed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    running = StatusFile(tmp_path).status
    (tmp_path / "status.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(running, pid=gone.pid))
    )
    assert read_status(tmp_path).status == "failed"
    assert "killed" in read_status(tmp_path).reason


def test_a_status_is_replaced_whole_and_leaves_no_other_file(tmp_path: Path) -> None:
    StatusFile(tmp_path).finish("done", "all steps")
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_status_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(WireError, match=r"status\.json"):
        read_status(tmp_path)


def test_a_cause_is_told_with_its_error() -> None:
    error = EngineError("engine e0 is lost")
    error.__cause__ = OSError("no route to host")
    assert describe(error) == "engine e0 is lost (because of OSError: no route to host)"


def test_s81_a_full_disk_has_room_for_the_final_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StatusFile(tmp_path, run_id="r" * 100)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(layout, "write_file", full)
    assert status.finish("stopped", "x") == 0
    written = read_status(tmp_path)
    assert (written.status, written.reason, written.exit_code) == ("stopped", "x", 0)


def test_a_cause_is_not_lost_because_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StatusFile(tmp_path)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(layout, "write_file", broken)
    assert status.fail(RuntimeError("the cause")) == 1
    assert status.status.reason == "RuntimeError: the cause"
