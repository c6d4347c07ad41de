"""A disk that is full, or slow: what the journal cannot write is kept, told, and written when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event as Signal
from typing import Any, BinaryIO

import numpy as np
import pytest

from journal.records import rollout
from paceline.domain.events import RolloutEnded, TimerFired
from paceline.domain.ids import RolloutId
from paceline.journal import FileJournal, read_journal, read_rollouts
from paceline.journal import writer as writer_module
from paceline.journal.output import Output


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


class Told:
    """What a journal said of room, in order."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def __call__(self, what: str, why: str) -> None:
        self.said.append((what, why))

    def of(self, what: str) -> list[bool]:
        """Whether it was missing, each time that this changed."""
        missing = [bool(why) for each, why in self.said if each == what]
        return [one for n, one in enumerate(missing) if not n or missing[n - 1] != one]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.001)


def seqs(run_dir: Path, notes: list[str]) -> list[int]:
    return [record.seq for record in read_journal(run_dir, on_note=notes.append)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["log", "rollouts"])
async def test_what_a_full_disk_took_of_a_record_is_cut_off_and_the_same_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float
) -> None:
    told = Told()
    kept = FileJournal(tmp_path, "run", on_room=told)
    for number in range(3):
        kept.append(0.0, RolloutEnded(rollout(number)), ())
    await kept.flush()
    path = next((tmp_path / ("journal" if kind == "log" else "rollouts")).glob("000001.*"))
    before = path.stat().st_size
    put, attempts = Output._put, Signal()

    def full(self: Output, file: BinaryIO, data: bytes) -> None:
        if self._kind != kind:
            put(self, file, data)
            return
        put(self, file, data[: int(share * len(data))])
        if attempts.is_set():
            assert path.stat().st_size <= before + len(data), "an attempt lies before the next"
        attempts.set()
        no_space()

    with monkeypatch.context() as patch:
        patch.setattr(Output, "_put", full)
        for number in range(3, 6):
            kept.append(0.0, RolloutEnded(rollout(number)), ())
        waiting = asyncio.ensure_future(kept.flush())
        await asyncio.to_thread(attempts.wait)
        await asyncio.sleep(0.05)
        assert not waiting.done(), "it waits for room"
    await waiting
    await kept.close()
    assert told.of("the journal") == [True, False]
    notes: list[str] = []
    assert seqs(tmp_path, notes) == list(range(6))
    assert [one.task.index for one in read_rollouts(tmp_path, on_note=notes.append)] == list(range(6))
    assert not notes
    assert sum(one.stat().st_size for one in (tmp_path / "rollouts").iterdir()) < 3 * before
    for folder in ("journal", "rollouts"):
        assert len([one for one in (tmp_path / folder).iterdir() if one.name != "lock"]) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_is_full_when_it_should_flush_is_waited_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, failed = Told(), Signal()
    kept = FileJournal(tmp_path, "run", on_room=told)
    kept.append(0.0, TimerFired(), ())
    await kept.flush()

    def full(_handle: int) -> None:
        failed.set()
        no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        kept.append(0.0, RolloutEnded(rollout(1)), ())
        waiting = asyncio.ensure_future(kept.flush())
        await asyncio.to_thread(failed.wait)
    await waiting
    await kept.close()
    assert seqs(tmp_path, []) == [0, 1]
    assert told.of("the journal") == [True, False]


@pytest.mark.usefixtures("impatient")
async def test_who_gives_up_hears_of_the_full_disk_and_closing_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = FileJournal(tmp_path, "run")
    monkeypatch.setattr(Output, "_put", no_space)
    kept.append(0.0, TimerFired(), ())
    waiting = asyncio.ensure_future(kept.flush())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    kept.give_up()
    with pytest.raises(OSError, match="No space left"):
        await waiting
    with pytest.raises(OSError, match="1 journal records could not be written"):
        await kept.close()


@pytest.mark.usefixtures("impatient")
async def test_a_full_disk_that_breaks_is_told_as_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, told = [errno.ENOSPC, errno.ENOSPC, errno.EIO], [0]
    broken: list[int | None] = []

    def fails(*_: Any) -> None:
        code = codes[min(told[0], 2)]
        told[0] += 1
        raise OSError(code, os.strerror(code))

    kept = FileJournal(tmp_path, "run", on_error=lambda error: broken.append(error.errno))
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_put", fails)
        kept.append(0.0, TimerFired(), ())
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            await kept.flush()
        while told[0] < 6:  # noqa: ASYNC110 - it is said once, however often it is tried
            await asyncio.sleep(0.001)
    await kept.close()
    assert broken == [errno.EIO]
    assert seqs(tmp_path, []) == [0]


async def test_a_backlog_beyond_its_bound_is_told_and_that_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, go_on = Told(), Signal()
    flush = Output.flush
    kept = FileJournal(tmp_path, "run", fsync_s=0.01, backlog_bytes=100_000, on_room=told)
    one = rollout(1, ((1000, 1000),))  # 12 kB and a little
    kept.append(0.0, RolloutEnded(one), ())
    await kept.flush()

    def slow(self: Output) -> None:
        go_on.wait()
        flush(self)

    monkeypatch.setattr(Output, "flush", slow)
    for _ in range(7):
        kept.append(0.0, RolloutEnded(one), ())
    assert not told.said
    for _ in range(7):
        kept.append(0.0, RolloutEnded(one), ())
    assert told.of("the backlog of the journal") == [True]
    assert 160_000 < kept.backlog_bytes < 200_000
    go_on.set()
    await kept.flush()
    await kept.close()
    assert told.of("the backlog of the journal") == [True, False]
    assert "0 MB wait for a slow disk" in told.said[0][1]


@pytest.fixture
def small_disk(small_file_system: Callable[[str], Path]) -> Path:
    return small_file_system("1m")


@pytest.mark.usefixtures("impatient")
async def test_a_real_full_disk_tears_no_record_and_loses_none(small_disk: Path) -> None:
    told = Told()
    (small_disk / "other").write_bytes(bytes(700_000))
    kept = FileJournal(small_disk, "run", on_room=told)
    rng = np.random.default_rng(0)
    number = 0
    while not told.said:
        sizes = ((int(rng.integers(1, 3000)), int(rng.integers(1, 3000))),)
        kept.append(0.0, RolloutEnded(rollout(number, sizes, id=RolloutId(number, 0))), ())
        number += 1
        flushed = asyncio.ensure_future(kept.flush())
        while not (flushed.done() or told.said):  # noqa: ASYNC110 - whichever comes first
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not flushed.done()
    notes: list[str] = []
    assert seqs(small_disk, notes) == list(range(number - 1)), "readers see what is whole, meanwhile"
    (small_disk / "other").unlink()
    await flushed
    await kept.close()
    assert told.of("the journal") == [True, False]
    notes.clear()
    assert seqs(small_disk, notes) == list(range(number))
    assert [one.id.group for one in read_rollouts(small_disk, on_note=notes.append)] == list(range(number))
    assert not notes
