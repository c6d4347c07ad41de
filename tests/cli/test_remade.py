"""`paceline replay RUN --batches` makes every batch of a run again, or says which cannot be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.per_token import PerToken
from paceline.cli.main import main
from paceline.cli.remade import Differs, NotMade, Remade, remade, told
from paceline.config import BatchSection
from paceline.core.advantages import Algorithm
from paceline.core.packing import pack_as
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.journal import FileJournal
from paceline.journal.files import file_numbers, file_path
from paceline.testing import World, chaos, setup_for, train_env
from paceline.transport.encode import encode

PACKED = BatchSection(seq_len=64, data_parallel=2, pad_to_multiple_of=8)
CONFIG = """
[model]
name = "pkg:paceline/assets/small_policy"
[[env]]
id = "reverse-text"
[batch]
seq_len = 64
data_parallel = 2
pad_to_multiple_of = 8
[trainer]
type = "external"
[sampling]
max_tokens = 12
"""
SETUP = setup_for(
    train_env("a", tasks=40, group_size=3, max_attempts=2, on_stale="mask_tokens"),
    batch=6,
    lag=2,
    max_staleness=1,
    max_steps=12,
)


def recorded(
    run_dir: Path,
    algorithm: Algorithm | None = None,
    *,
    says: bool = True,
    run_id: str = "test",
    steps: int = 12,
    **options: Any,
) -> int:
    """A run with its journal, store and config on disk, as it hands its batches over, up to `steps`; how many."""
    world = World(SETUP, chaos(3, failures=0.2), engines=2, cap=8, algorithm=algorithm)
    trace = world.run()
    digests: dict[int, tuple[str, ...]] = {}

    async def write() -> None:
        journal = FileJournal(run_dir, run_id, **options)
        for number, (at, event, commands) in enumerate(trace.journal):
            for command in commands:
                if isinstance(command, do.ShipBatch):
                    packed = pack_as(PACKED, command.batch)
                    ranks = [encode(packed, rank, run_id=run_id) for rank in (0, 1)]
                    digests[command.batch.step] = tuple(each.digest for each in ranks)
            if isinstance(event, on.RunOpened):
                event = msgspec.structs.replace(event, run_id=run_id)
            if isinstance(event, on.BatchShipped) and says:
                event = msgspec.structs.replace(event, digests=digests[event.step])
            journal.append(at, event, commands)
            if isinstance(event, on.BatchShipped) and event.step == steps:
                break
            if number % 20 == 0:  # so that the store has several files
                await journal.flush()
        await journal.close()

    asyncio.run(write())
    (run_dir / "config.toml").write_text(CONFIG)
    return len(digests)


@pytest.mark.parametrize("algorithm", [None, PerToken()], ids=["one advantage", "one a token"])
def test_every_batch_is_made_again_with_its_tokens_masks_and_advantages(
    tmp_path: Path, algorithm: Algorithm | None, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = recorded(tmp_path, algorithm)
    assert batches == 12
    assert main(["replay", str(tmp_path), "--batches"]) == 0
    assert capsys.readouterr().out == "12 batches are the same to the byte\n"


def test_the_first_batch_that_is_made_otherwise_is_named_with_both_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG.replace("pad_to_multiple_of = 8", "pad_to_multiple_of = 4"))
    assert main(["replay", str(tmp_path), "--batches", "--json"]) == 1
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["same"], found["differs"]["step"], found["differs"]["rank"]) == (0, 1, 0)
    assert len({found["differs"]["shipped"], found["differs"]["made"], ""}) == 3
    assert main(["replay", str(tmp_path), "--batches"]) == 1
    assert found["differs"]["shipped"] in capsys.readouterr().out


def test_batches_whose_tokens_retention_dropped_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, file_bytes=3000)
    numbers = file_numbers(tmp_path, "rollouts")
    assert len(numbers) > 4
    for number in numbers[: len(numbers) // 2]:
        file_path(tmp_path, "rollouts", number).unlink()
    found = remade(tmp_path)
    assert found.differs is None
    assert found.same + len(found.not_made) == 12
    assert found.same > 2
    assert found.not_made[0].step == 1
    assert main(["replay", str(tmp_path), "--batches"]) == 2
    said = capsys.readouterr().out
    assert "journal.keep_token_steps or journal.keep_token_mb dropped them" in said
    lost = len(found.not_made)
    assert f"{found.same} of 12 batches are the same to the byte; {lost} could not be made again\n" in said


def test_without_hashes_and_files_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, says=False)
    assert main(["replay", str(tmp_path), "--batches"]) == 2
    said = capsys.readouterr()
    assert "batches 1 to 12 were not made again: the journal has no hash of its files" in said.out
    assert "no batch could be made again" in said.err


def test_the_batches_of_two_runs_are_compared_whatever_the_runs_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    recorded(one)
    recorded(again, run_id="another", file_bytes=3000)
    recorded(other, PerToken())
    assert main(["replay", str(one), "--batches", "--against", str(again)]) == 0
    assert capsys.readouterr().out == "12 batches are the same to the byte\n"
    assert main(["replay", str(one), "--batches", "--against", str(other)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "batch 1, rank 0, differs; 0 before it are the same"
    assert [line.split()[0] for line in said[1:]] == [str(other), str(one)]
    numbers = file_numbers(again, "rollouts")
    for number in numbers[: len(numbers) // 2]:
        file_path(again, "rollouts", number).unlink()
    assert main(["replay", str(one), "--batches", "--against", str(again)]) == 2
    assert f"not made again: that of {again} cannot be made: " in capsys.readouterr().out


def test_a_run_with_more_batches_is_another_whichever_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    recorded(long)
    recorded(short, steps=7)
    assert main(["replay", str(short), "--batches", "--against", str(long)]) == 1
    assert capsys.readouterr().out.startswith("batch 8, rank 0, differs; 7 before it are the same")
    assert main(["replay", str(long), "--batches", "--against", str(short)]) == 1
    assert capsys.readouterr().out.startswith("batch 8, rank 0, differs; 7 before it are the same")


def test_batches_are_told_together_only_where_they_follow_each_other() -> None:
    lost = [NotMade(step, "lost") for step in (1, 2, 5)]
    assert told(Remade(3, None, tuple(lost))).splitlines() == [
        "batches 1 to 2 were not made again: lost",
        "batch 5 was not made again: lost",
        "3 of 6 batches are the same to the byte; 3 could not be made again",
    ]


def test_a_batch_that_differs_outweighs_those_that_cannot_be_made() -> None:
    lost = (NotMade(1, "lost"),)
    assert Remade(3, None, ()).exit_code == 0
    assert Remade(3, Differs(5, 0, "a", "b"), lost).exit_code == 1
    assert Remade(3, None, lost).exit_code == 2
