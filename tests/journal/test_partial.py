"""Parts of rollouts under way: on disk for as long as their rollouts have not ended, and no burden to the run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from paceline.domain.events import RolloutEnded
from paceline.domain.ids import RolloutId
from paceline.domain.part import Asked, Part
from paceline.domain.rollout import COMPLETED, Rollout
from paceline.domain.task import TaskRef
from paceline.journal.output import Output
from paceline.journal.partial import PartStore, read_parts

A, B = RolloutId(0, 0), RolloutId(0, 1)


def part(rollout: RolloutId, number: int, tokens: int = 5) -> Part:
    random = np.random.default_rng(number)
    return Part(
        rollout,
        number,
        number // 2,
        3 * (number % 2),
        -1,
        random.integers(0, 1000, 0 if number % 2 else 4).astype(np.int32),
        random.integers(0, 1000, tokens).astype(np.int32),
        -random.random(tokens).astype(np.float32),
        ((1, 2), (2, tokens - 2)),
        "abort",
        Asked(9, 0.7, 0.9, 40, ("\n", "é")),
        "e0",
        3,
        0.5,
        1.5,
        2.5,
        0.75,
        1234 + number,
    )


def same(one: Part, other: Part) -> bool:
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        for a, b in ((getattr(one, name), getattr(other, name)) for name in Part.__struct_fields__)
    )


class Kept:
    """A journal, of which all but the last `behind` records are durable."""

    def __init__(self) -> None:
        self.next_seq = self.behind = 0

    @property
    def durable(self) -> int:
        return self.next_seq - self.behind

    def ends(self, store: PartStore, rollout: RolloutId) -> None:
        """As in a run: the runner has done with it, then its record is handed over."""
        store.ended(rollout)
        self.next_seq += 1
        ended = RolloutEnded(Rollout(id=rollout, task=TaskRef("a", "train", 0), outcome=COMPLETED))
        store.apply(0.0, ended, ())


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "partial").iterdir())


async def until(holds: object) -> None:
    for _ in range(500):
        if holds():  # type: ignore[operator]
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


async def test_parts_come_back_as_they_were_until_their_rollout_has_ended(tmp_path: Path) -> None:
    store = PartStore(tmp_path, "run", kept := Kept(), fsync_s=0)
    sent = [part(A, 0), part(B, 0), part(A, 1), part(A, 2)]
    for each in sent:
        store.keep(each)
    await until(lambda: store.written == 4)
    found = read_parts(tmp_path, [A, B])
    assert [p.number for p in found[A]] == [0, 1, 2]
    assert all(same(one, other) for one, other in zip(found[A], [sent[0], *sent[2:]], strict=True))
    assert same(found[B][0], sent[1])
    assert set(read_parts(tmp_path, [B])) == {B}
    kept.ends(store, A)
    kept.ends(store, B)
    await store.close()
    assert files(tmp_path) == []


async def test_a_rollout_that_ends_before_they_are_written_costs_no_disk(tmp_path: Path) -> None:
    store = PartStore(tmp_path, "run", Kept(), fsync_s=60)
    store.keep(part(A, 0))
    store.keep(part(B, 0))
    store.ended(A)
    await store.close()
    assert store.written == 1
    assert set(read_parts(tmp_path, [A, B])) == {B}, "one that is under way when the run is cut off is kept"


async def test_files_go_when_the_record_of_every_rollout_in_them_is_durable(tmp_path: Path) -> None:
    store = PartStore(tmp_path, "run", kept := Kept(), fsync_s=0, file_bytes=1)
    for number in range(3):
        store.keep(part(A, number))
        await until(lambda number=number: store.written == number + 1)
    store.keep(part(B, 0))
    await until(lambda: store.written == 4)
    assert files(tmp_path) == ["000001.part", "000002.part", "000003.part", "000004.part"]
    kept.behind = 1
    kept.ends(store, A)
    store.keep(part(B, 1))
    await until(lambda: store.written == 5)
    assert len(files(tmp_path)) == 5, "its record may be lost yet, and it would go on from them"
    kept.behind = 0
    store.keep(part(B, 2))
    await until(lambda: len(files(tmp_path)) == 3)
    assert set(read_parts(tmp_path, [A, B])) == {B}
    await store.close()


async def test_the_next_life_keeps_what_goes_on_and_drops_the_rest(tmp_path: Path) -> None:
    first = PartStore(tmp_path, "run", Kept(), fsync_s=0, file_bytes=1)
    for number, each in enumerate((part(A, 0), part(B, 0), part(A, 1))):
        first.keep(each)
        await until(lambda number=number: first.written == number + 1)
    await first.close()  # a kill leaves no less
    second = PartStore(tmp_path, "run", kept := Kept(), goes_on={A}, fsync_s=0)
    second.keep(part(A, 2))
    await until(lambda: second.written == 1 and len(files(tmp_path)) == 3)
    assert [p.number for p in read_parts(tmp_path, [A, B])[A]] == [0, 1, 2]
    assert set(read_parts(tmp_path, [A, B])) == {A}
    kept.ends(second, A)
    await second.close()
    assert files(tmp_path) == []


async def test_an_unfinished_end_is_cut_and_damage_costs_tokens_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PartStore(tmp_path, "run", Kept(), fsync_s=0)
    for number in range(3):
        store.keep(part(A, number))
        await until(lambda number=number: store.written == number + 1)
    await store.close()
    path = tmp_path / "partial" / "000001.part"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert [p.number for p in read_parts(tmp_path, [A])[A]] == [0, 1]
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert [p.number for p in read_parts(tmp_path, [A])[A]] == [0]
    assert "go on with fewer tokens" in caplog.text
    await PartStore(tmp_path, "run", Kept(), goes_on={A}).close()


async def test_a_disk_that_refuses_them_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, refused = Output.write, [True]

    def full(self: Output, *args: object, **options: object) -> None:
        if refused[0]:
            raise OSError(28, "No space left on device")
        write(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Output, "write", full)
    store = PartStore(tmp_path, "run", Kept(), fsync_s=0)
    store.keep(part(A, 0))
    await until(lambda: "No space left" in caplog.text)
    store.keep(part(A, 1))
    await asyncio.sleep(0.05)
    refused[0] = False
    store.keep(part(B, 0))
    await until(lambda: store.written == 1)
    await store.close()
    assert caplog.text.count("No space left") == 1
    assert set(read_parts(tmp_path, [A, B])) == {B}


async def test_a_full_disk_is_left_no_torn_parts_and_no_files_begun_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tries = Output._put, [0]

    def full(self: Output, file: BinaryIO, data: bytes) -> None:
        if self._size:  # there is room for what a file begins with
            put(self, file, data[: len(data) // 2])
            tries[0] += 1
            raise OSError(28, "No space left on device")
        put(self, file, data)

    store = PartStore(tmp_path, "run", kept := Kept(), fsync_s=0)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_put", full)
        for number in range(3):
            store.keep(part(A, number))
            await until(lambda number=number: tries[0] == number + 1)
    store.keep(part(B, 0))
    await until(lambda: store.written == 1)
    assert files(tmp_path) == ["000001.part"]
    assert set(read_parts(tmp_path, [A, B])) == {B}
    kept.ends(store, B)
    await store.close()
    assert files(tmp_path) == []


async def test_files_that_a_failing_disk_leaves_behind_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tries = Output._put, [0]

    def broken(self: Output, file: BinaryIO, data: bytes) -> None:
        if self._size:
            tries[0] += 1
            raise OSError(5, "Input/output error")
        put(self, file, data)

    monkeypatch.setattr(Output, "_put", broken)
    store = PartStore(tmp_path, "run", Kept(), fsync_s=0)
    for number in range(3):
        store.keep(part(A, number))
        await until(lambda number=number: tries[0] == number + 1)
    await store.close()
    assert files(tmp_path) == []
