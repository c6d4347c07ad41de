"""What a run takes of its disk is told, and never in the way of how the run ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli import disk
from paceline.cli.assemble import Assembly
from paceline.cli.run import execute
from paceline.config import RunConfig
from paceline.errors import WireError
from paceline.transport import room
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


def listening(run_dir: Path) -> tuple[asyncio.Queue[tuple[str, str]], asyncio.Task[None]]:
    """What a meter tells, and the meter."""
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def run() -> None:
        await disk.DiskMeter(run_dir).run(lambda what, why: heard.put_nowait((what, why)))

    return heard, asyncio.create_task(run())


async def test_a_disk_that_fills_up_is_noticed_although_this_process_writes_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_EVERY_S", 0.01)
    heard, meter = listening(small_disk)
    other = small_disk / "other"
    other.write_bytes(bytes(5 * 2**19))  # half a megabyte is left: something can be written
    await asyncio.sleep(0.1)
    assert heard.empty()
    fill(other)
    what, why = await asyncio.wait_for(heard.get(), 10)
    assert what == "the run directory"
    assert os.strerror(errno.ENOSPC) in why
    other.unlink()
    assert await asyncio.wait_for(heard.get(), 10) == ("the run directory", "")
    assert os.listdir(small_disk) == []
    meter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meter


async def test_a_disk_that_has_room_again_is_noticed_long_before_the_next_look(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_EVERY_S", 3600.0)
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    other = small_disk / "other"
    fill(other)
    heard, meter = listening(small_disk)
    assert (await asyncio.wait_for(heard.get(), 10))[1]
    other.unlink()
    assert await asyncio.wait_for(heard.get(), 10) == ("the run directory", "")
    meter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meter


async def test_a_trainer_that_has_no_room_for_what_is_large_says_so_where_the_run_looks(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_EVERY_S", 0.01)
    monkeypatch.setattr(room, "RETRY_S", 0.02)
    other, weights = small_disk / "other", small_disk / "weights"
    other.write_bytes(bytes(3 * 2**19))  # a megabyte and a half is left: too little for the weights alone
    told: list[str] = []
    stop = threading.Event()

    def write() -> None:
        try:
            weights.write_bytes(bytes(2**21))
        except OSError:
            weights.unlink()
            raise

    def waits() -> None:
        paceline.write_with_room(small_disk, "weights v7", write, stop=stop.is_set, tell=told.append)

    heard, meter = listening(small_disk)
    trainer = asyncio.create_task(asyncio.to_thread(waits))
    what, why = await asyncio.wait_for(heard.get(), 10)
    assert what == "the trainer's weights v7"
    assert os.strerror(errno.ENOSPC) in why
    other.unlink()
    assert await asyncio.wait_for(heard.get(), 10) == ("the trainer's weights v7", "")
    await asyncio.wait_for(trainer, 10)
    assert told == [why]
    assert os.listdir(small_disk) == ["weights"]

    weights.unlink()
    other.write_bytes(bytes(3 * 2**19))
    trainer = asyncio.create_task(asyncio.to_thread(waits))
    assert (await asyncio.wait_for(heard.get(), 10))[1]
    stop.set()
    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(trainer, 10)
    assert await asyncio.wait_for(heard.get(), 10) == ("the trainer's weights v7", "")
    assert not meter.done()

    (small_disk / "trainer_waits.json").write_text("soon")
    with pytest.raises(WireError, match=r"trainer_waits\.json is not what a trainer"):
        await asyncio.wait_for(meter, 10)


def test_how_a_run_ended_is_told_when_its_disk_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.model_validate({"model": {"name": str(tmp_path)}, "env": [{"id": "e:E"}]})
    open_run(tmp_path, "run")
    monkeypatch.setattr(Assembly, "run", broken)
    monkeypatch.setattr(shutil, "disk_usage", broken)
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


def test_a_library_that_speaks_of_a_position_when_the_disk_is_full_is_put_into_the_systems_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.01)
    told: list[str] = []

    def write() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 6068800 vs 6068688")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        paceline.write_with_room(tmp_path, "weights v7", write, stop=lambda: bool(told), tell=told.append)
    assert told == ["No space left on device (unexpected pos 6068800 vs 6068688)"]
