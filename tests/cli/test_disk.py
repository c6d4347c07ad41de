"""What a run takes of its disk is told, and never in the way of how the run ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import disk
from paceline.cli.assemble import Assembly
from paceline.cli.run import execute
from paceline.config import RunConfig
from paceline.transport.status import open_run, read_status


def broken(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_it_is_told_by_what_it_is_and_without_what_may_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, nbytes in (("journal/1.log", 5), ("rollouts/1.seg", 7), ("mine/deep/er", 11), ("shut/in", 13)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(nbytes))
    scandir = os.scandir

    def guarded(place: Any) -> Any:
        if Path(place).name == "shut":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", guarded)
    use = disk.disk_use(tmp_path)
    assert {name: nbytes for name, nbytes in use.parts.items() if nbytes} == {
        "events": 5,
        "tokens": 7,
        "other": 11,
    }
    assert use.free > 0
    with pytest.raises(OSError, match="gone"):
        disk.disk_use(tmp_path / "gone")


@pytest.fixture
def small_disk(small_file_system: Callable[[str], Path]) -> Path:
    return small_file_system("3m")


def fill(place: Path) -> None:
    with place.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


async def test_a_disk_that_fills_up_is_noticed_although_this_process_writes_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_EVERY_S", 0.01)
    heard: asyncio.Queue[str] = asyncio.Queue()
    meter = asyncio.create_task(disk.DiskMeter(small_disk).run(heard.put_nowait))
    other = small_disk / "other"
    other.write_bytes(bytes(5 * 2**19))  # half a megabyte is left: something can be written
    await asyncio.sleep(0.1)
    assert heard.empty()
    fill(other)
    assert os.strerror(errno.ENOSPC) in await asyncio.wait_for(heard.get(), 10)
    other.unlink()
    assert await asyncio.wait_for(heard.get(), 10) == ""
    assert os.listdir(small_disk) == []
    meter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meter


async def test_a_disk_that_has_room_again_is_noticed_long_before_the_next_look(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_EVERY_S", 3600.0)
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    heard: asyncio.Queue[str] = asyncio.Queue()
    other = small_disk / "other"
    fill(other)
    meter = asyncio.create_task(disk.DiskMeter(small_disk).run(heard.put_nowait))
    assert await asyncio.wait_for(heard.get(), 10)
    other.unlink()
    assert await asyncio.wait_for(heard.get(), 10) == ""
    meter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meter


def test_how_a_run_ended_is_told_when_its_disk_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.model_validate({"model": {"name": str(tmp_path)}, "env": [{"id": "e:E"}]})
    open_run(tmp_path, "run")
    monkeypatch.setattr(Assembly, "run", broken)
    monkeypatch.setattr(disk, "disk_use", broken)
    outcome = execute(config, tmp_path, "run", plain=True)
    assert outcome.code == 1
    assert outcome.summary["status"] == "failed"
    assert "disk" not in outcome.summary
    said = capsys.readouterr().err
    assert "disk: cannot be looked at: [Errno 5] Input/output error" in said
    assert f"failed: {tmp_path}" in said
    status = read_status(tmp_path)
    assert status is not None
    assert status.exit_code == 1
