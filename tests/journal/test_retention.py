"""What retention drops: the oldest files, within its bound, and none that tells of a rollout that is still needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from journal.records import rollout
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import Batch
from paceline.domain.group import GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.journal import FileJournal, dropped_before, read_journal, read_rollouts
from paceline.journal.retention import Needed

FILE = 4_000


def started(one: Rollout) -> do.StartRollout:
    return do.StartRollout(one.id, one.task, 1, 2, "e0", 0)


def queued(one: Rollout) -> on.GroupProcessed:
    return on.GroupProcessed(GroupResult(one.id.group, (Verdict(one.id, "queued", "", (), 0.5),), 0.5, 0.25))


async def lived(journal: FileJournal, number: int, *, until: str = "shipped") -> None:
    """A rollout that is a group and a batch of its own, up to that point."""
    one = rollout(number, ((50, 200),), id=RolloutId(number, 0))
    course: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("started", on.TimerFired(), (started(one),)),
        ("ended", on.RolloutEnded(one), ()),
        ("queued", queued(one), ()),
        ("cut", on.TimerFired(), (do.ShipBatch(Batch(number + 1, (), (one.id,))),)),
        ("shipped", on.BatchShipped(number + 1, 100, 0.0, 0.0), ()),
    ]
    for at, event, commands in course:
        journal.append(0.0, event, commands)
        await journal.flush()
        if at == until:
            return


def kept(run_dir: Path) -> list[int]:
    return [one.id.group for one in read_rollouts(run_dir)]


def store_bytes(run_dir: Path) -> int:
    size = 0
    for path in (run_dir / "rollouts").iterdir():
        with suppress(FileNotFoundError):  # the writer's thread drops files meanwhile
            size += path.stat().st_size
    return size


async def test_the_store_stays_within_its_bytes_and_events_stay(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "run", keep_bytes=8 * FILE)
    sizes = []
    for number in range(60):
        await lived(journal, number)
        sizes.append(store_bytes(tmp_path))
    await journal.close()
    assert max(sizes) <= 9 * FILE
    left = kept(tmp_path)
    assert left == list(range(left[0], 60))
    assert 0 < left[0] < 55
    assert sum(isinstance(r.event, on.RolloutEnded) for r in read_journal(tmp_path)) == 60
    first = dropped_before(tmp_path)
    ends = {
        r.seq: r.event.rollout.id.group
        for r in read_journal(tmp_path)
        if isinstance(r.event, on.RolloutEnded)
    }
    assert {group for seq, group in ends.items() if seq < first} == set(range(left[0]))


async def test_the_last_steps_are_kept_and_older_ones_go(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "run", keep_steps=10, file_bytes=1)
    for number in range(30):
        await lived(journal, number)
    await journal.close()
    # Rollouts 20 to 29 ended after batch 20 was cut. That the file before holds nothing later, only the next one tells.
    assert kept(tmp_path) == list(range(19, 30))


@pytest.mark.parametrize("until", ["started", "ended", "queued", "cut"])
async def test_what_is_under_way_queued_or_not_shipped_is_never_dropped(tmp_path: Path, until: str) -> None:
    journal = FileJournal(tmp_path, "run", keep_steps=0, file_bytes=1)
    for number in range(3):
        await lived(journal, number)
    await lived(journal, 3, until=until)
    for number in range(4, 12):
        await lived(journal, number)
    await journal.close()
    assert kept(tmp_path) == [n for n in range(2, 12) if n != 3 or until != "started"]
    # Another life knows of it from the one before.
    journal = FileJournal(tmp_path, "run", keep_steps=0, file_bytes=1)
    one = rollout(3, id=RolloutId(3, 0))
    journal.needs([] if until == "cut" else [one.id], {4: (one.id,)} if until == "cut" else {})
    for number in range(12, 15):
        await lived(journal, number)
    assert 4 in kept(tmp_path)
    if until == "cut":
        journal.append(0.0, on.BatchShipped(4, 100, 0.0, 0.0), ())
    else:
        journal.append(0.0, on.TimerFired(), (do.NoteDiscarded(one.id, 1),))
    for number in range(15, 18):
        await lived(journal, number)
    await journal.close()
    assert kept(tmp_path) == [17]


def test_an_attempt_is_needed_until_the_next_one_starts_and_evals_never_after_they_ended() -> None:
    needed = Needed()
    first = rollout(0, id=RolloutId(0, 0))
    needed.see(5, on.TimerFired(), (started(first),))
    needed.see(6, on.RolloutEnded(first), (do.NoteRetry(first.id),))
    assert needed.since == 5
    again = rollout(0, id=RolloutId(0, 0, 1))
    needed.see(9, on.TimerFired(), (started(again),))
    assert needed.since == 9
    needed.see(10, on.TimerFired(), (do.FinishRun("done", ""),))
    assert needed.since is None
