"""A run goes on from the journal's files as if nothing had happened, but for what was under way."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cli.per_token import PerToken
from paceline.cli.resume import read_back, resumption
from paceline.cli.run import _finished
from paceline.config import RunConfig
from paceline.core.advantages import Algorithm
from paceline.core.recovery import EMPTY, Recovery
from paceline.core.scheduler import Core
from paceline.domain.batch import Batch
from paceline.domain.commands import ProcessGroup, ShipBatch
from paceline.errors import CannotFold, WireError
from paceline.journal import FileJournal, dropped_before, read_journal, read_rollouts
from paceline.journal.files import file_path
from paceline.journal.frames import FrameReader
from paceline.runtime.checkpoints import Checkpoints
from paceline.testing import World, chaos, setup_for, train_env
from paceline.transport.layout import weights_dir
from paceline.transport.status import RunStatus, write_status

EARLIER = Path(__file__).parents[1] / "assets" / "earlier_release"


SETUP = setup_for(
    train_env("a", tasks=40, group_size=3, max_attempts=2, on_stale="mask_tokens"),
    batch=6,
    lag=2,
    max_staleness=1,
    max_steps=30,
    checkpoint_every=4,
)


def written(
    run_dir: Path,
    seed: int,
    events: int,
    *,
    algorithm: Algorithm | None = None,
    flush_every: int = 10_000,
    watch: Any = None,
    **options: Any,
) -> World:
    """A run that was killed after so many events, its journal on disk."""
    world = World(SETUP, chaos(seed), engines=2, cap=8, algorithm=algorithm, watch=watch)
    world.run(events=events)

    async def write() -> None:
        journal = FileJournal(run_dir, "run", **options)
        for number, (at, event, commands) in enumerate(world.trace.journal):
            journal.append(at, event, commands)
            if number % flush_every == flush_every - 1:
                await journal.flush()
        await journal.close()

    asyncio.run(write())
    return world


def state_of(core: Core) -> dict[str, Any]:
    state: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(core.snapshot()), strict=False)
    return state


def plain(batch: Batch) -> list[Any]:
    arrays = [(s.token_ids, s.trainable, s.logprobs, np.asarray(s.advantage)) for s in batch.samples]
    return [
        (sample.rollout, sample.versions, sample.reward, [array.tolist() for array in each])
        for sample, each in zip(batch.samples, arrays, strict=True)
    ]


@pytest.mark.parametrize("algorithm", [None, PerToken()], ids=["one advantage", "one a token"])
@pytest.mark.parametrize("events", [30, 200, 500])
def test_state_and_batch_list_come_back_with_every_token(
    tmp_path: Path, events: int, algorithm: Algorithm | None
) -> None:
    world = written(tmp_path, 7, events, algorithm=algorithm)
    read = read_back(tmp_path, EMPTY, {})
    state, expected = read.recovery.state(read.rollouts, read.extras), state_of(world.core)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False)
    for name in ("list", "groups", "processing", "flights", "cut", "seq"):
        assert state[name] == expected[name], name
    assert [each.id for each in read.recovery.under_way] == list(world.running)


@pytest.mark.parametrize("seed", [7, 8])
def test_killed_behind_any_record_the_files_give_back_the_core_of_that_moment(
    tmp_path: Path, seed: int
) -> None:
    moments: list[dict[str, Any] | None] = []

    def watch(world: World, _event: Any, _commands: Any) -> None:
        draining = world.core._draining is not None  # what is being stopped is not gone on with
        moments.append(None if draining else state_of(world.core))

    written(tmp_path, seed, 150, flush_every=1, watch=watch)
    log = file_path(tmp_path, "log", 1)
    with FrameReader(log) as reader:
        ends = [frame.offset for frame in iter(reader.next, None)]
    assert len(ends) == len(moments)
    ends.append(log.stat().st_size)
    # The store keeps what it has: it is written before the log.
    for count in range(len(moments), 0, -1):
        os.truncate(log, ends[count])
        if (expected := moments[count - 1]) is None:
            continue
        read = read_back(tmp_path, EMPTY, {})
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(read.recovery.state(read.rollouts, read.extras)), strict=False
        )
        for name in ("list", "groups", "processing", "flights", "cut", "seq"):
            assert state[name] == expected[name], f"{name} after record {count - 1}"


def test_what_was_commanded_and_not_answered_is_owed_the_same_to_the_byte(tmp_path: Path) -> None:
    for events in range(60, 400):
        world = World(SETUP, chaos(3), engines=2, cap=8)
        world.run(events=events)
        if any(isinstance(c, ShipBatch) for c in world.trace.journal[-1][2]):
            break
    world = written(tmp_path, 3, events)
    read = read_back(tmp_path, EMPTY, {})
    owed = read.recovery.owed(read.rollouts, read.extras)
    ships = [command for command in owed if isinstance(command, ShipBatch)]
    assert [plain(command.batch) for command in ships] == [plain(world.trace.batches[-1])]
    closed = [command.group for command in owed if isinstance(command, ProcessGroup)]
    assert [group.id for group in closed] == list(world.core.processing)


def test_from_a_checkpoint_only_what_lies_behind_it_is_read(tmp_path: Path) -> None:
    world = written(tmp_path, 11, 700)
    _, checkpoint = world.trace.checkpoints[-1]
    assert checkpoint["seq"] > 100
    from_checkpoint, from_start = read_back(tmp_path, checkpoint, {}), read_back(tmp_path, EMPTY, {})

    def told(read: Any) -> Any:
        state = read.recovery.state(read.rollouts, read.extras)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False) | {
            "curriculum": None,
            "plan": None,
            "placement": None,
        }

    first, second = told(from_checkpoint), told(from_start)
    assert {k: v for k, v in first.items() if k != "account"} == {
        k: v for k, v in second.items() if k != "account"
    }
    assert from_checkpoint.recovery.since > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [{"keep_steps": 0}, {"keep_steps": 2}, {"keep_bytes": 1}])
def test_what_retention_leaves_is_enough_to_go_on(tmp_path: Path, seed: int, policy: dict[str, int]) -> None:
    dropped = []
    for events in (40, 150, 400, 700):
        run_dir = tmp_path / str(events)
        world = written(run_dir, seed, events, algorithm=PerToken(), flush_every=5, file_bytes=300, **policy)
        # From the first record, as if no checkpoint could be read.
        read = read_back(run_dir, EMPTY, {})
        state, expected = read.recovery.state(read.rollouts, read.extras), state_of(world.core)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), strict=False)
        assert all(state[name] == expected[name] for name in ("list", "groups", "processing"))
        assert read.recovery.owed(read.rollouts, read.extras) is not None
        dropped.append(dropped_before(run_dir))
    assert dropped[-1] > 100


def config(max_steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"name": "m"}, "env": [{"id": "a", "group_size": 3}], "run": {"max_steps": max_steps}}
    )


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            {"version": 2, "run_id": "r"},
            "says version 2 of run 'r', but its directory is v{n:06d} of run 'r'",
        ),
        ({"run_id": "other"}, "of run 'other', but its directory is v{n:06d} of run 'r'"),
        (None, "does not say which version these weights are"),
        ({}, ""),
    ],
)
def test_weights_that_say_they_are_others_are_not_gone_on_from(
    tmp_path: Path, says: dict[str, Any] | None, told: str
) -> None:
    cut = written(tmp_path, 11, 700).core.cut
    write_status(tmp_path, RunStatus(run_id="r", status="stopped"))
    (tmp_path / "checkpoints" / "trainer" / f"v{cut:08d}").mkdir(parents=True)
    weights = weights_dir(tmp_path, cut)
    weights.mkdir(parents=True)
    if says is not None:
        (weights / "version.json").write_bytes(msgspec.json.encode({"version": cut, "run_id": "r"} | says))
    if not told:
        goes_on = resumption(tmp_path, config(max_steps=30))[1]
        assert goes_on is not None
        assert goes_on.trained == cut
        return
    with pytest.raises(WireError) as refused:
        resumption(tmp_path, config(max_steps=30))
    assert f"{weights}/version.json" in str(refused.value)
    assert told.format(n=cut) in str(refused.value)


def test_a_run_is_done_by_what_its_checkpoints_hold_and_not_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 11, 700)
    write_status(tmp_path, RunStatus(run_id="r", status="done"))
    core = Checkpoints(tmp_path / "checkpoints" / "core", 3, "r")
    core.save(8, {"cut": 8})
    folder = tmp_path / "checkpoints" / "core"
    (folder / "step_000999.ckpt").write_bytes((folder / "step_000008.ckpt").read_bytes())
    assert _finished(tmp_path, config(max_steps=9)) is None
    core.save(9, {"cut": 9})
    (folder / "step_000999.ckpt").write_bytes((folder / "step_000008.ckpt").read_bytes())
    assert _finished(tmp_path, config(max_steps=9)) is not None
    said = capsys.readouterr().err
    assert "step_000999.ckpt holds step 8" in said
    assert "is done, with 9 of 9 steps" in said


def test_without_a_journal_there_is_no_way_back_and_damage_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CannotFold, match="there is no journal"):
        read_back(tmp_path, EMPTY, {})
    written(tmp_path, 1, 400, flush_every=100)
    log = tmp_path / "journal" / "000001.log"
    data = bytearray(log.read_bytes())
    data[400] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(WireError, match=r"(?s)damaged at byte .* or move .* aside, to go on from the newest"):
        read_back(tmp_path, EMPTY, {})


def test_a_journal_of_an_earlier_release_is_read_and_folded_at_every_record() -> None:
    """Written when groups that wait stood in no record, and no frame named its commit. It is not recorded again."""
    rollouts = {rollout.id: rollout for rollout in read_rollouts(EARLIER)}
    recovery = Recovery(EMPTY)
    open_groups = 0
    for record in read_journal(EARLIER):
        recovery.apply(*record)
        open_groups = max(open_groups, len(recovery.state(rollouts, {})["groups"]))
        assert recovery.wanted() <= set(rollouts)
    assert (recovery.seq, recovery.cut, len(rollouts), open_groups > 1) == (410, 6, 70, True)
    assert (recovery.under_way, recovery.owed(rollouts, {})) == ([], [])


def test_a_checkpoint_of_an_older_format_is_refused_as_a_beginning() -> None:
    with pytest.raises(CannotFold, match="did not note its place"):
        read_back(Path("nowhere"), {"cut": 3}, {})
