"""The journal: what went in comes out, whatever kills the writer, and damage is told from an unfinished write."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from journal.records import one_of_each, rollout
from paceline.domain.commands import Command, FinishRun
from paceline.domain.events import Event, RolloutEnded, RunFailed, TimerFired
from paceline.domain.group import GroupResult, Verdict
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Message, Outcome, Rollout, Turn
from paceline.domain.sample import Sample
from paceline.errors import WireError
from paceline.journal import FileJournal, Record, read_journal, read_rollouts
from paceline.journal import lines as l
from paceline.journal import writer as writer_module
from paceline.journal.frames import SCHEMA
from paceline.journal.packing import Packer, Unpacker

RUN = "run-1"


def journal(run_dir: Path, **options: Any) -> FileJournal:
    return FileJournal(run_dir, RUN, **{"fsync_s": 60.0, **options})


async def write(run_dir: Path, *groups: int, **options: Any) -> None:
    """Append so many timer events and flush, for each number given."""
    kept = journal(run_dir, **options)
    for count in groups:
        for _ in range(count):
            kept.append(1.0, TimerFired(), ())
        await kept.flush()
    await kept.close()


def seqs(run_dir: Path, notes: list[str] | None = None) -> list[int]:
    on_note = (notes if notes is not None else []).append
    return [record.seq for record in read_journal(run_dir, on_note=on_note)]


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    for name in Rollout.__struct_fields__:
        if name != "turns":
            assert getattr(one, name) == getattr(other, name), name
    assert len(one.turns) == len(other.turns)
    for sent, got in zip(one.turns, other.turns, strict=True):
        for name in Turn.__struct_fields__:
            a, b = getattr(sent, name), getattr(got, name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
            else:
                assert a == b, name


# --- round trips ---------------------------------------------------------------------------------------------


async def test_every_event_and_command_comes_back_in_order(tmp_path: Path) -> None:
    sent = one_of_each()
    assert {type(event) for event, _ in sent} == set(get_args(Event))
    assert {type(command) for _, commands in sent for command in commands} == set(get_args(Command))
    kept = journal(tmp_path)
    for at, (event, commands) in enumerate(sent):
        kept.append(float(at), event, commands)
    await kept.close()
    got = list(read_journal(tmp_path))
    assert [(r.seq, r.at) for r in got] == [(n, float(n)) for n in range(len(sent))]
    for (event, commands), record in zip(sent, got, strict=True):
        assert type(record.event) is type(event)
        # Equal lines are equal records but for what the log leaves out.
        assert l.line_of(record.event) == l.line_of(event)
        assert [l.line_of(command) for command in record.commands] == [
            l.line_of(command) for command in commands
        ]


async def test_token_counts_from_the_log_equal_those_of_the_live_events(tmp_path: Path) -> None:
    sent = one_of_each()
    kept = journal(tmp_path)
    for event, commands in sent:
        kept.append(0.0, event, commands)
    await kept.close()

    def counts(records: list[tuple[Any, Any]]) -> list[Any]:
        out: list[Any] = []
        for event, commands in records:
            match event:
                case RolloutEnded(rollout=r):
                    out.append(
                        (r.sampled_tokens, r.prompt_tokens, r.oldest_version, r.newest_version, r.env_s)
                    )
            for verdict in event.result.verdicts if hasattr(event, "result") else ():
                out += [(s.tokens, s.trainable_tokens, s.oldest_version) for s in verdict.samples]
            for command in commands:
                if hasattr(command, "batch"):
                    out.append((command.batch.step, command.batch.tokens, command.batch.rollouts))
                if hasattr(command, "group") and hasattr(command.group, "rollouts"):
                    out.append([r.sampled_tokens for r in command.group.rollouts])
        return out

    read = [(record.event, record.commands) for record in read_journal(tmp_path)]
    assert counts(read) == counts(list(sent))


async def test_rollouts_come_back_to_the_bit_with_messages_and_info(tmp_path: Path) -> None:
    sent = [
        rollout(n, sizes) for n, sizes in enumerate([((5, 7),), (), ((3, 0), (0, 4), (9, 1)), ((900, 3000),)])
    ]
    kept = journal(tmp_path)
    for one in sent:
        kept.append(0.0, RolloutEnded(one), ())
    await kept.close()
    for one, other in zip(sent, read_rollouts(tmp_path), strict=True):
        assert_same_rollout(one, other)
    (picked,) = read_rollouts(tmp_path, [sent[2].id])
    assert_same_rollout(sent[2], picked)
    assert list(read_rollouts(tmp_path, [RolloutId(99, 0)])) == []


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4).map(tuple),
        min_size=1,
        max_size=12,
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
)
@settings(max_examples=80, deadline=None)
def test_any_rollouts_survive_packing(sizes: list[tuple[tuple[int, int], ...]], info: Any) -> None:
    sent = [rollout(n, one, info={"any": info}) for n, one in enumerate(sizes)]
    for one, other in zip(sent, Unpacker().rollouts(Packer().rollouts(sent), "here", None), strict=True):
        assert_same_rollout(one, other)


ODD = [
    {"info": {"a": {1, 2}, "b": object, 3: np.float32(1.5), "c": np.arange(3)}},
    {"info": {"big": 2**70, "half": "\ud800"}},
    {"messages": (Message("user", "\ud800"),)},
    {"reward": np.float64(0.5), "metrics": {"n": np.int64(3)}},
    {"reward": True, "rewards": {"a": None}},
    {"outcome": Outcome("failed", "environment", "ValueError: \udcff")},
    {"turns": (msgspec.structs.replace(rollout(1).turns[0], logprobs=np.zeros(3, np.float32)),)},
    {"turns": (msgspec.structs.replace(rollout(1).turns[0], logprobs=np.zeros(30, np.float32)),)},
]


@pytest.mark.parametrize("odd", ODD)
async def test_an_odd_rollout_keeps_neither_itself_nor_others_from_disk(tmp_path: Path, odd: Any) -> None:
    kept = journal(tmp_path)
    sent = [rollout(0), rollout(1, **odd), rollout(2)]
    for one in sent:
        kept.append(0.0, RolloutEnded(one), ())
    await kept.close()
    got = list(read_rollouts(tmp_path))
    for one, other in ((sent[0], got[0]), (sent[2], got[2])):
        assert_same_rollout(one, other)
    assert got[1].id == sent[1].id
    np.testing.assert_array_equal(got[1].turns[0].sampled_ids, sent[1].turns[0].sampled_ids)
    assert seqs(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("record", "line", "left_out", "renamed"),
    [
        (Rollout, l.RolloutLine, {"messages", "info"}, {}),
        (Turn, l.TurnLine, {"logprobs"}, {"prompt_ids": "prompt_tokens", "sampled_ids": "sampled_tokens"}),
        (Sample, l.SampleLine, {"trainable", "logprobs"}, {"token_ids": "tokens"}),
        (Verdict, l.VerdictLine, set(), {}),
        (GroupResult, l.GroupResultLine, set(), {}),
    ],
)
def test_a_line_has_every_field_of_its_record(
    record: Any, line: Any, left_out: set[str], renamed: Any
) -> None:
    expected = [renamed.get(name, name) for name in record.__struct_fields__ if name not in left_out]
    assert sorted(line.__struct_fields__) == sorted(expected)


def test_a_line_of_a_later_release_with_more_fields_is_read() -> None:
    class Later(msgspec.Struct, array_like=True):
        seq: int
        at: float
        event: Any
        commands: list[Any]
        cause: int = 7

    event = {"type": "TimerFired", "late_by": 0.5}
    payload = msgspec.msgpack.encode(
        [Packer()._zstd.compress(msgspec.msgpack.encode([Later(4, 1.0, event, [])]))]
    )
    (line,) = Unpacker().records(payload, "here")
    assert (line.seq, line.event) == (4, TimerFired())


# --- durability ----------------------------------------------------------------------------------------------


async def test_append_does_not_wait_and_flush_makes_everything_durable(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    for _ in range(10):
        kept.append(0.0, TimerFired(), ())
    assert (kept.backlog, kept.next_seq) == (10, 10)
    await asyncio.gather(kept.flush(), kept.flush())
    assert kept.backlog == 0
    assert seqs(tmp_path) == list(range(10))
    await kept.close()
    await kept.close()
    kept.append(0.0, TimerFired(), ())
    with pytest.raises(OSError, match="closed"):
        await kept.flush()


async def test_commits_happen_without_a_flush(tmp_path: Path) -> None:
    for fsync_s in (0.0, 0.01):
        kept = journal(tmp_path, fsync_s=fsync_s)
        kept.append(0.0, TimerFired(), ())
        while kept.backlog:  # noqa: ASYNC110 - the point is that nobody asks for it
            await asyncio.sleep(0)
        await kept.close()
    assert seqs(tmp_path) == [0, 1]


async def test_a_journal_opened_again_goes_on_in_a_new_file(tmp_path: Path) -> None:
    await write(tmp_path, 3)
    await write(tmp_path, 2)
    assert seqs(tmp_path) == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "journal").glob("*.log")) == ["000001.log", "000002.log"]


async def test_files_rotate_by_size_and_read_as_one(tmp_path: Path) -> None:
    kept = journal(tmp_path, file_bytes=200)
    for n in range(20):
        kept.append(0.0, RolloutEnded(rollout(n)), ())
        await kept.flush()
    await kept.close()
    assert len(list((tmp_path / "journal").glob("*.log"))) > 3
    assert len(list((tmp_path / "rollouts").glob("*.seg"))) > 3
    assert seqs(tmp_path) == list(range(20))
    assert len(list(read_rollouts(tmp_path))) == 20


async def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    with pytest.raises(WireError, match="another process writes this run's journal"):
        journal(tmp_path)
    await kept.close()
    await journal(tmp_path).close()


async def test_s54_the_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    await write(tmp_path, 3)
    with pytest.raises(WireError, match="is of run 'run-1', this is run 'run-2'"):
        FileJournal(tmp_path, "run-2")
    await journal(tmp_path).close()


KILLED = """
import asyncio, sys
from journal.records import rollout
from paceline.domain.events import RolloutEnded
from paceline.journal import FileJournal

async def main():
    kept = FileJournal(sys.argv[1], "run-1", fsync_s=0.005)
    print("next", kept.next_seq, flush=True)
    rollouts = [rollout(n, ((50, 200),)) for n in range(50)]
    while True:
        for one in rollouts:
            kept.append(0.0, RolloutEnded(one), ())
        at = kept.next_seq
        await kept.flush()
        print("durable", at, flush=True)

asyncio.run(main())
"""


def test_s53_a_writer_killed_at_any_moment_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(paceline.__file__).parents[1]), str(Path(__file__).parents[1])])
    durable = 0
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        said = process.stdout.readline().split()
        began = int(said[1])
        assert began >= durable
        for _ in range(2 + 3 * attempt):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")
        process.wait()
        process.stdout.close()
        flushed = [int(line.split()[1]) for line in rest if line.startswith(b"durable ") and line.split()[1:]]
        durable = max([durable, *flushed])
        found = seqs(tmp_path)
        assert found == sorted(set(found))
        assert found[-1] + 1 >= durable
        assert set(range(began, durable)) <= set(found)
        assert len(list(read_rollouts(tmp_path, on_note=print))) >= len(found)


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(1, 400))
def test_s53_an_unfinished_end_is_cut_at_the_last_whole_record_and_noted(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        asyncio.run(write(run_dir, 2, 3))
        path = run_dir / "journal/000001.log"
        data = path.read_bytes()
        frames = [i for i in range(len(data)) if data[i : i + 4] == b"PLFR"]
        cut = min(cut, len(data) - frames[0])
        path.write_bytes(data[:-cut])
        notes: list[str] = []
        end = len(data) - cut
        whole = [0, 1, 2, 3, 4] if end >= len(data) else [0, 1] if end >= frames[1] else []
        assert seqs(run_dir, notes) == whole
        assert len(notes) == (0 if end in (frames[0], frames[1]) else 1)
        # And the run goes on behind it.
        asyncio.run(write(run_dir, 1))
        assert seqs(run_dir, notes) == [*whole, len(whole)]


async def test_a_flipped_bit_at_the_end_is_an_unfinished_write_and_one_before_it_is_damage(
    tmp_path: Path,
) -> None:
    await write(tmp_path, 2, 3, 4)
    path = tmp_path / "journal/000001.log"
    data = path.read_bytes()
    frames = [i for i in range(len(data)) if data[i : i + 4] == b"PLFR"]
    for position in range(frames[2], len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        notes: list[str] = []
        assert seqs(tmp_path, notes) == [0, 1, 2, 3, 4]
        assert len(notes) == 1
    for position in range(frames[1], frames[2]):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(WireError, match=f"000001.log is damaged at byte {frames[1]}"):
            seqs(tmp_path)


async def test_s53_a_kill_between_store_and_log_leaves_a_gap_in_the_numbers_and_no_number_twice(
    tmp_path: Path,
) -> None:
    await write(tmp_path, 2)
    kept = journal(tmp_path)
    kept.append(0.0, RolloutEnded(rollout(1)), ())
    await kept.close()
    (tmp_path / "journal/000002.log").unlink()  # as if it had never been begun
    kept = journal(tmp_path)
    kept.append(0.0, RolloutEnded(rollout(2)), ())
    await kept.close()
    assert seqs(tmp_path) == [0, 1, 3]
    assert [r.task.index for r in read_rollouts(tmp_path)] == [1, 2]


async def test_s50_what_was_written_is_held_no_longer(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    alive = []
    for n in range(20):
        one = rollout(n, ((5, 1000),))
        alive.append(weakref.ref(one.turns[0].sampled_ids))
        kept.append(0.0, RolloutEnded(one), ())
        del one
        await kept.flush()
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1
    await kept.close()


async def test_a_missing_log_file_is_noticed(tmp_path: Path) -> None:
    for _ in range(3):
        await write(tmp_path, 2)
    (tmp_path / "journal/000002.log").unlink()
    with pytest.raises(
        WireError, match=r"000003.log follows record 3, but the files before it end with record 1"
    ):
        seqs(tmp_path)


async def test_a_journal_of_a_future_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    await write(tmp_path, 1)
    path = tmp_path / "journal/000001.log"
    data = bytearray(path.read_bytes())
    data[8] = 77
    path.write_bytes(data)
    with pytest.raises(
        WireError, match=f"journal schema 77, this Paceline reads {SCHEMA}: read it with the release"
    ):
        seqs(tmp_path)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_s91_payloads_of_random_bytes_are_refused(payload: bytes) -> None:
    packer = Packer()
    blocks = msgspec.msgpack.encode([packer._zstd.compress(payload)])
    store = msgspec.msgpack.encode(
        [[[0, 0, 0]], [0, len(payload) // 4 * 4, 0], packer._zstd.compress(payload)]
    )
    for data in (payload, blocks, store, b"\xdd\xff\xff\xff\xff" + payload, b"\x91" * 10_000):
        for read in (
            Unpacker().records(data, "x.log at byte 5"),
            Unpacker().rollouts(data, "x.log at byte 5", None),
        ):
            with contextlib.suppress(WireError):
                assert list(read) == []


def test_s91_a_block_that_would_unpack_to_gigabytes_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 16))
    # The stated content size, of 8 bytes, in a frame header made by hand.
    huge = bomb[:4] + b"\xe0" + (1 << 40).to_bytes(8, "little") + bomb[7:]
    with pytest.raises(WireError, match="1099511627776 bytes unpacked"):
        list(Unpacker().records(msgspec.msgpack.encode([huge]), "x"))


# --- a failing disk ------------------------------------------------------------------------------------------


async def test_records_whose_flush_failed_are_written_again_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.001)
    kept = journal(tmp_path)
    kept.append(0.0, TimerFired(), ())
    await kept.flush()
    fsync, failures = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def fail_once(handle: int) -> None:
        if failures:
            raise failures.pop()
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_once)
    kept.append(0.0, TimerFired(), ())
    with pytest.raises(OSError, match="Input/output"):
        await kept.flush()
    kept.append(0.0, TimerFired(), ())
    await kept.flush()
    await kept.close()
    assert (tmp_path / "journal/000001.log").read_bytes().count(b"PLFR") == 2  # it was whole all the same
    assert seqs(tmp_path) == [0, 1, 2]


async def test_flush_returns_at_once_where_only_the_store_kept_the_last_moment(tmp_path: Path) -> None:
    await write(tmp_path, 2)
    kept = journal(tmp_path)
    kept.append(0.0, RolloutEnded(rollout(1)), ())
    await kept.close()
    (tmp_path / "journal/000002.log").unlink()  # killed between store and log
    kept = journal(tmp_path)
    await asyncio.wait_for(kept.flush(), 20)
    await kept.close()


# --- following -----------------------------------------------------------------------------------------------


async def test_a_follower_sees_records_as_they_become_durable_and_ends_with_the_run(tmp_path: Path) -> None:
    sent = [each for each in one_of_each() if not isinstance(each[0], RunFailed)]  # that one ends it, too
    kept = journal(tmp_path, file_bytes=300)
    got: list[Record] = []

    def follow() -> None:
        got.extend(read_journal(tmp_path, follow=True))

    following = asyncio.create_task(asyncio.to_thread(follow))
    for event, commands in sent:
        kept.append(0.0, event, commands)
        await kept.flush()
    await kept.close()
    await asyncio.wait_for(following, 20)
    assert [record.seq for record in got] == list(range(len(sent)))


async def test_a_follower_of_a_resumed_run_goes_on_into_its_next_life(tmp_path: Path) -> None:
    for status in ("stopped", "done"):
        kept = journal(tmp_path)
        kept.append(0.0, TimerFired(), ())
        kept.append(1.0, TimerFired(), (FinishRun(status, ""),))
        await kept.close()
    assert [r.seq for r in read_journal(tmp_path, follow=True)] == [0, 1, 2, 3]


def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="holds no journal"):
        seqs(tmp_path)
    with pytest.raises(WireError, match="holds no journal"):
        list(read_rollouts(tmp_path))
    assert list(read_journal(tmp_path, follow=True, stop=lambda: True)) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_flush_that_comes_while_the_writer_ends_of_a_mistake_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    kept = journal(tmp_path, fsync_s=0.0, on_error=lambda _: loop.call_soon_threadsafe(told.set))
    monkeypatch.setattr(kept._packer, "records", lambda records: 1 / 0)
    slow, close = threading.Event(), kept._log.abandon
    monkeypatch.setattr(kept._log, "abandon", lambda: (slow.wait(10), close()))
    kept.append(0.0, TimerFired(), ())
    await told.wait()
    try:
        with pytest.raises(OSError, match="closed"):
            async with asyncio.timeout(5):
                await kept.flush()
    finally:
        slow.set()
    await asyncio.to_thread(kept._thread.join)


@pytest.mark.parametrize("kind", ["journal", "rollouts"])
async def test_files_that_are_removed_while_they_are_written_end_it_with_their_name(
    tmp_path: Path, kind: str
) -> None:
    """What is written to a file without a name is lost when it is closed, and no write of it fails."""
    told: list[BaseException] = []
    kept = journal(tmp_path, fsync_s=0.01, on_error=told.append)
    kept.append(0.0, RolloutEnded(rollout(0)), ())
    await kept.flush()
    (removed,) = (tmp_path / kind).glob("000001.*")
    removed.unlink()
    kept.append(1.0, RolloutEnded(rollout(1)), ())
    with pytest.raises(OSError, match=rf"{removed} was removed while it was being written"):
        await kept.flush()
    with pytest.raises(OSError, match="the journal is closed"):
        await kept.flush()
    (error,) = told
    assert isinstance(error, WireError)
    with pytest.raises(OSError, match="could not be written"):
        await kept.close()
