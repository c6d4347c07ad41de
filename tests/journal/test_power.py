"""A failing power supply leaves what no kill does: pages of a commit that came later, without those before them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from journal.records import rollout
from paceline.cli.resume import read_back
from paceline.core.recovery import EMPTY
from paceline.domain.events import RolloutEnded
from paceline.errors import WireError
from paceline.journal import FileJournal, read_journal, read_rollouts
from paceline.journal import writer as writer_module
from paceline.journal.frames import LeftOut


def journal(run_dir: Path, **options: Any) -> FileJournal:
    return FileJournal(run_dir, "run-1", **{"fsync_s": 60.0, **options})


async def commit(run_dir: Path, *commits: range) -> None:
    """Rollouts with these numbers end, and are committed together. One frame of the store holds one."""
    kept = journal(run_dir)
    for numbers in commits:
        # All at once: the writer may still be awake from the commit before, and takes what it finds.
        kept._queue.extend(
            (kept._seq + n, 0.0, RolloutEnded(rollout(each)), ()) for n, each in enumerate(numbers)
        )
        kept._seq += len(numbers)
        await kept.flush()
    await kept.close()


def frames(path: Path) -> list[tuple[int, int]]:
    data = path.read_bytes()
    begins = [i for i in range(len(data)) if data[i : i + 4] == b"PLFR"]
    return list(zip(begins, [*begins[1:], len(data)], strict=True))


def zeroed(path: Path, where: list[tuple[int, int]]) -> None:
    """These pages have never reached the disk."""
    data = bytearray(path.read_bytes())
    for begin, end in where:
        data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def stored(run_dir: Path, notes: list[str] | None = None) -> list[int]:
    told = [] if notes is None else notes
    return [each.task.index for each in read_rollouts(run_dir, on_note=told.append)]


@pytest.fixture(autouse=True)
def one_rollout_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_BLOCK_TURNS", 1)


async def test_s53_whatever_pages_of_the_last_commit_are_missing_it_is_left_out_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    for lost in [c for n in (1, 2, 3) for c in combinations(range(4), n)]:
        run_dir = tmp_path / "-".join(map(str, lost))
        await commit(run_dir, range(2), range(2, 6))
        store, log = run_dir / "rollouts/000001.seg", run_dir / "journal/000001.log"
        last = frames(store)[2:]
        assert len(last) == 4
        zeroed(store, [last[n] for n in lost])
        log.write_bytes(log.read_bytes()[: frames(log)[1][0]])  # it is written when the store is durable
        notes: list[str] = []
        assert stored(run_dir, notes) == [0, 1, *range(2, 2 + lost[0])], "up to the first that is missing"
        behind = 4 - len(lost) - lost[0]
        assert [isinstance(note, LeftOut) for note in notes] == [behind > 0]
        if behind:
            assert f"({behind} whole frames behind it" in notes[0]
        read = read_back(run_dir, EMPTY, {})
        assert read.recovery.seq == 2
        await commit(run_dir, range(6, 8))
        assert stored(run_dir) == [0, 1, *range(2, 2 + lost[0]), 6, 7]
        assert len(list(read_journal(run_dir))) == 4


async def test_what_is_missing_before_the_last_commit_is_damage_whatever_follows(tmp_path: Path) -> None:
    await commit(tmp_path, range(2), range(2, 4), range(4, 7))
    store = tmp_path / "rollouts/000001.seg"
    whole, all_frames = store.read_bytes(), frames(store)
    for lost in ([0], [1], [2], [3], [3, 4], [2, 3, 4], [3, 4, 5], [1, 2, 3, 4, 5]):
        store.write_bytes(whole)
        zeroed(store, [all_frames[n] for n in lost])
        with pytest.raises(WireError, match=f"damaged at byte {all_frames[lost[0]][0]}"):
            stored(tmp_path)


async def test_commits_are_told_apart_however_many_there_are(tmp_path: Path) -> None:
    await commit(tmp_path, *(range(n, n + 1) for n in range(300)))
    store = tmp_path / "rollouts/000001.seg"
    zeroed(store, [frames(store)[280]])
    with pytest.raises(WireError, match="is damaged"):
        stored(tmp_path)


async def test_a_file_of_which_nothing_but_its_length_reached_the_disk_was_never_begun(
    tmp_path: Path,
) -> None:
    await commit(tmp_path, range(2))
    for name in ("rollouts/000002.seg", "journal/000002.log"):
        (tmp_path / name).write_bytes(bytes(160))
    assert stored(tmp_path) == [0, 1]
    await commit(tmp_path, range(2, 3))
    assert stored(tmp_path) == [0, 1, 2]
    assert [record.seq for record in read_journal(tmp_path)] == [0, 1, 2]


async def test_a_file_of_zeros_that_is_longer_than_a_header_held_what_was_durable(tmp_path: Path) -> None:
    await commit(tmp_path, *(range(n, n + 1) for n in range(20)))
    log = tmp_path / "journal/000001.log"
    zeroed(log, [(0, log.stat().st_size)])
    with pytest.raises(WireError, match="is no journal file: it begins with"):
        list(read_journal(tmp_path))
    with pytest.raises(WireError, match=r"move .* aside"):
        read_back(tmp_path, EMPTY, {})
    with pytest.raises(WireError, match="is no journal file"):
        journal(tmp_path)


async def test_resuming_says_what_the_power_has_cost(tmp_path: Path) -> None:
    await commit(tmp_path, range(2), range(2, 5))
    store, log = tmp_path / "rollouts/000001.seg", tmp_path / "journal/000001.log"
    missing = frames(store)[2]
    zeroed(store, [missing])
    log.write_bytes(log.read_bytes()[: frames(log)[1][0]])
    (note,) = read_back(tmp_path, EMPTY, {}).notes
    assert note.startswith(f"{store}: a damaged frame at byte {missing[0]}")
    assert "2 whole frames behind it" in note
