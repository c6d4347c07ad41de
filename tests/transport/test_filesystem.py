"""Batches and weights through a directory: whole or not there, once, in order, of this run alone."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.domain.batch import PackedBatch
from paceline.errors import ConfigError, TrainerError, WireError
from paceline.ports import Published
from paceline.transport import layout
from paceline.transport.filesystem import FilesystemBatches, FilesystemPolicy, digest_of
from paceline.transport.layout import rank_file
from paceline.transport.reader import BatchTimeout, ReceivedBatch, publish_weights, read_batches
from paceline.transport.status import finish, open_run, read_status
from transport.batches import packed

RUN = "run-1"


def batch(step: int, seed: int = 0) -> PackedBatch:
    return packed(seed, [[[5, 6]], [[7]]], step=step)


def ship(run_dir: Path, *steps: int, keep: int = 16, seed: int = 0) -> None:
    sink = FilesystemBatches(run_dir, RUN, keep=keep)
    for step in steps:
        asyncio.run(sink.ship(batch(step, seed)))


def read(run_dir: Path, **options: Any) -> list[ReceivedBatch]:
    """Everything that is there now."""
    return list(read_batches(run_dir, stop=lambda: True, **options))


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def looks(policy: FilesystemPolicy) -> list[Published]:
    """What is to be seen now."""
    policy._look()
    found = list(policy._found)
    policy._found.clear()
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    open_run(tmp_path, RUN)
    return tmp_path


# --- batches -------------------------------------------------------------------------------------------------


async def test_a_shipped_batch_is_read_by_every_rank(run_dir: Path) -> None:
    sent = batch(1)
    shipped = await FilesystemBatches(run_dir, RUN).ship(sent)
    assert shipped.nbytes == sum(path.stat().st_size for path in (run_dir / "batches/step_000001").iterdir())
    for rank in (0, 1):
        (got,) = read(run_dir, rank=rank)
        assert (got.step, got.trains, got.rank, got.ranks, got.run_id) == (1, 0, rank, 2, RUN)
        assert digest_of(rank_file(run_dir, 1, rank)) == shipped.digests[rank]
        ids = [m.token_ids.tolist() for m in got.micro_batches]
        assert ids == [m.token_ids.tolist() for m in sent.ranks[rank]]


def test_the_same_batch_may_be_shipped_again_and_another_one_of_its_step_may_not(run_dir: Path) -> None:
    ship(run_dir, 1)
    ship(run_dir, 1)
    with pytest.raises(WireError, match=r"step_000001/rank_0000.plb has content .* the batch to ship"):
        ship(run_dir, 1, seed=1)
    (got,) = read(run_dir)
    assert got.micro_batches[0].token_ids.tolist() == batch(1).ranks[0][0].token_ids.tolist()


def test_only_the_last_acknowledged_batches_are_kept_and_unacknowledged_ones_always(run_dir: Path) -> None:
    ship(run_dir, 1, 2, 3, 4, 5, keep=2)
    assert layout.steps_in(run_dir / "batches") == [1, 2, 3, 4, 5]
    for got in read(run_dir)[:4]:
        got.ack()
    ship(run_dir, 6, keep=2)
    assert layout.steps_in(run_dir / "batches") == [3, 4, 5, 6]


def test_s50_what_was_shipped_is_held_no_longer(run_dir: Path) -> None:
    sink, alive = FilesystemBatches(run_dir, RUN, keep=2), []
    for step in range(1, 21):
        sent = batch(step)
        alive.append(weakref.ref(sent.ranks[0][0].token_ids))
        asyncio.run(sink.ship(sent))
        del sent
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1


@pytest.mark.parametrize("at", ["mkdir", "encode", "first file", "flush", "rename"])
def test_s53_a_ship_that_is_interrupted_anywhere_leaves_no_batch_and_can_be_repeated(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    class Interrupted(BaseException):
        pass

    def stop(*_: Any, **__: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as broken:
        if at == "mkdir":
            broken.setattr(Path, "mkdir", stop)
        elif at == "encode":
            broken.setattr("paceline.transport.filesystem.encode", stop)
        elif at == "first file":
            broken.setattr("paceline.transport.filesystem.write_file", stop)
        elif at == "flush":
            broken.setattr(layout, "flush_entry", stop)
        else:
            broken.setattr(Path, "rename", stop)
        with pytest.raises(Interrupted):
            FilesystemBatches(run_dir, RUN)._ship(batch(1))
    assert read(run_dir) == []
    ship(run_dir, 1)
    assert [got.step for got in read(run_dir)] == [1]


SHIP_FOREVER = """
import asyncio, sys
from transport.batches import packed
from paceline.transport.filesystem import FilesystemBatches
sink = FilesystemBatches(sys.argv[1], "run-1", keep=1000)
for step in range(1, 100_000):
    asyncio.run(sink.ship(packed(0, [[[50, 60]], [[70]]], step=step)))
    print(step, flush=True)
"""


def test_s53_a_shipper_killed_at_any_moment_leaves_only_whole_batches(run_dir: Path) -> None:
    path = os.pathsep.join([str(Path(paceline.__file__).parents[1]), str(Path(__file__).parents[1])])
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SHIP_FOREVER, str(run_dir)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(7)]
        process.send_signal(signal.SIGKILL)
        said += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        for rank in (0, 1):
            steps = [got.step for got in read(run_dir, rank=rank)]
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) >= said[-1]
    open_run(run_dir, RUN, resume_step=5)
    assert [got.step for got in read(run_dir)] == [1, 2, 3, 4, 5]
    assert not list((run_dir / "batches").glob(".*"))


# --- the reader ----------------------------------------------------------------------------------------------


def test_a_trainer_that_starts_again_goes_on_behind_the_last_acknowledged_step(run_dir: Path) -> None:
    ship(run_dir, 1, 2, 3)
    read(run_dir)[0].ack()
    assert [got.step for got in read(run_dir)] == [2, 3]
    assert [got.step for got in read(run_dir, start_step=1)] == [1, 2, 3]


def test_a_batch_that_is_no_longer_kept_is_named_with_the_oldest_that_is(run_dir: Path) -> None:
    ship(run_dir, 4)
    with pytest.raises(
        WireError, match=r"step_000002 is no longer kept; the oldest batch there is of step 4"
    ):
        read(run_dir, start_step=2)


def test_the_iteration_ends_with_the_run_after_the_last_batch(run_dir: Path) -> None:
    ship(run_dir, 1, 2)
    finish(run_dir, "stopped", "asked to")
    assert [got.step for got in read_batches(run_dir)] == [1, 2]
    status = read_status(run_dir)
    assert status is not None
    assert (status.status, status.reason, status.run_id) == ("stopped", "asked to", RUN)


def test_a_batch_that_does_not_come_is_an_error_when_a_timeout_was_asked_for(run_dir: Path) -> None:
    with pytest.raises(BatchTimeout, match="no batch of step 1"):
        list(read_batches(run_dir, timeout=0))


def test_a_rank_that_was_not_packed_for_is_told_so(run_dir: Path) -> None:
    ship(run_dir, 1)
    with pytest.raises(WireError, match=r"packed for 2 ranks .*ranks must agree"):
        read(run_dir, rank=2)


def test_only_rank_zero_acknowledges(run_dir: Path) -> None:
    ship(run_dir, 1)
    read(run_dir, rank=1)[0].ack({"loss": 1.0})
    assert layout.steps_in(run_dir / "acks") == []


def test_a_damaged_batch_is_named(run_dir: Path) -> None:
    ship(run_dir, 1)
    path = run_dir / "batches/step_000001/rank_0000.plb"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WireError, match=r"rank_0000.plb is damaged"):
        read(run_dir)
    path.write_bytes(data[:-5])
    with pytest.raises(WireError, match=r"rank_0000.plb is cut off"):
        read(run_dir)


def test_the_package_offers_the_trainers_side_without_importing_the_orchestrator_or_torch() -> None:
    code = (
        "import sys, paceline; paceline.read_batches, paceline.publish_weights\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'aiohttp', 'pydantic', 'asyncio')\n"
        "       or m.startswith(('paceline.core', 'paceline.runtime', 'paceline.config', 'paceline.ports'))])"
    )
    path = str(Path(paceline.__file__).parents[1])
    out = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    assert out.strip() == b"[]"


@pytest.mark.torch
def test_micro_batches_come_as_torch_tensors_that_can_be_written_to(run_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    ship(run_dir, 1)
    (as_numpy,), (as_torch,) = read(run_dir), read(run_dir, as_torch=True)
    for one, other in zip(as_numpy.micro_batches, as_torch.micro_batches, strict=True):
        for name in ("token_ids", "trainable", "logprobs", "advantages", "temperatures", "position_ids"):
            tensor = getattr(other, name)
            assert isinstance(tensor, torch.Tensor)
            assert tensor.tolist() == getattr(one, name).tolist()
            tensor.zero_()


# --- weights and acknowledgements ----------------------------------------------------------------------------


def test_weights_and_acknowledgements_come_in_order_and_once(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN)
    assert looks(policy) == []
    ship(run_dir, 1, 2)
    for got in read(run_dir):
        publish_weights(run_dir, got.step, write_model)
        got.ack({"loss": 0.5 * got.step, "grad": math.inf})
    found = looks(policy)
    assert [(p.trained_step, p.version) for p in found] == [(1, None), (None, 1), (2, None), (None, 2)]
    assert found[0].metrics["loss"] == 0.5
    assert math.isnan(found[0].metrics["grad"])
    assert (Path(found[1].path) / "model.safetensors").read_bytes() == b"weights"
    assert looks(policy) == []


async def test_next_waits_for_what_comes_later_and_a_cancelled_wait_loses_nothing(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN, poll_s=0)
    waiting = asyncio.create_task(policy.next())
    await asyncio.sleep(0)
    waiting.cancel()
    publish_weights(run_dir, 1, write_model)
    assert (await policy.next()).version == 1


def test_a_version_is_never_reported_behind_a_newer_one(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN)
    publish_weights(run_dir, 7, write_model)
    assert [p.version for p in looks(policy)] == [7]
    publish_weights(run_dir, 6, write_model)
    publish_weights(run_dir, 7, write_model)
    assert looks(policy) == []


def test_a_torn_version_is_ignored_until_it_is_whole(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN)
    folder = run_dir / "weights/v000001"
    folder.mkdir(parents=True)
    write_model(folder)
    assert looks(policy) == []
    (folder / "version.json").write_text('{"version": 1, "run_')
    assert looks(policy) == []
    (folder / "version.json").write_text(json.dumps({"version": 1, "run_id": RUN}))
    assert [p.version for p in looks(policy)] == [1]


def test_s65_a_version_that_vanishes_is_skipped_and_the_next_is_taken(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN, after=5)
    publish_weights(run_dir, 6, write_model)
    publish_weights(run_dir, 7, write_model)
    seen = layout.versions_in

    def then_gone(folder: Path) -> list[int]:
        versions = seen(folder)
        shutil.rmtree(run_dir / "weights/v000006", ignore_errors=True)
        return versions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.transport.filesystem.versions_in", then_gone)
        assert [p.version for p in looks(policy)] == [7]


def test_a_failed_publication_leaves_nothing_and_the_version_before_stays(run_dir: Path) -> None:
    def fails(folder: Path) -> None:
        write_model(folder)
        raise OSError("disk full")

    publish_weights(run_dir, 1, write_model)
    for version in (1, 2):
        with pytest.raises(OSError, match="disk full"):
            publish_weights(run_dir, version, fails)
    assert [path.name for path in (run_dir / "weights").iterdir()] == ["v000001"]
    assert [p.version for p in looks(FilesystemPolicy(run_dir, RUN))] == [1]


def test_publishing_keeps_what_the_writer_stated_and_only_the_newest_versions(run_dir: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "version.json").write_text('{"version": 1, "dtype": "bfloat16"}')

    for version in range(1, 6):
        path = publish_weights(run_dir, version, write, keep=2)
    facts = json.loads((path / "version.json").read_bytes())
    assert facts == {"version": 5, "dtype": "bfloat16", "run_id": RUN}
    assert layout.versions_in(run_dir / "weights") == [4, 5]


def test_old_acknowledgements_are_removed_once_reported(run_dir: Path) -> None:
    policy = FilesystemPolicy(run_dir, RUN, keep_acks=2)
    ship(run_dir, *range(1, 6))
    for got in read(run_dir):
        got.ack()
    assert len(looks(policy)) == 5
    assert layout.steps_in(run_dir / "acks") == [4, 5]


# --- leftovers -----------------------------------------------------------------------------------------------


def leave_up_to_ten(run_dir: Path) -> None:
    ship(run_dir, *range(1, 11))
    for got in read(run_dir):
        publish_weights(run_dir, got.step, write_model)
        got.ack()


def test_s54_a_resume_at_5_sees_nothing_later(run_dir: Path) -> None:
    leave_up_to_ten(run_dir)
    open_run(run_dir, RUN, resume_step=5)
    policy = FilesystemPolicy(run_dir, RUN, after=5)
    assert looks(policy) == []
    assert [got.step for got in read(run_dir, start_step=5)] == [5]
    assert read(run_dir) == []
    ship(run_dir, 6, seed=3)
    assert [got.step for got in read(run_dir)] == [6]


@pytest.mark.parametrize("what", ["batches", "acks", "weights"])
def test_s54_a_fresh_start_among_leftovers_is_refused(run_dir: Path, what: str) -> None:
    leave_up_to_ten(run_dir)
    for other in {"batches", "acks", "weights"} - {what}:
        shutil.rmtree(run_dir / other)
    with pytest.raises(
        ConfigError, match=rf"already holds {what} up to 10, but a fresh run starts at step 1"
    ):
        open_run(run_dir, RUN)


def test_s54_a_directory_of_another_run_is_refused(run_dir: Path) -> None:
    for resume_step in (None, 5):
        with pytest.raises(ConfigError, match="belongs to run 'run-1', this is run 'run-2'"):
            open_run(run_dir, "run-2", resume_step=resume_step)


@pytest.mark.parametrize("what", ["weights", "ack", "batch"])
def test_s54_what_another_run_left_is_never_taken(run_dir: Path, what: str) -> None:
    leave_up_to_ten(run_dir)
    write = {
        "weights": lambda: publish_weights(run_dir, 11, write_model, "run-0"),
        "ack": lambda: _edit(run_dir / "acks/step_000010.json", lambda ack: {**ack, "run_id": "run-0"}),
        "batch": lambda: _edit(run_dir / "status.json", lambda status: {**status, "run_id": "run-0"}),
    }
    write[what]()
    if what == "batch":
        with pytest.raises(WireError, match=r"is of run 'run-1', the directory belongs to run 'run-0'"):
            read(run_dir, start_step=10)
    else:
        with pytest.raises(TrainerError, match=r"is of run 'run-0', this is run 'run-1': start a trainer"):
            looks(FilesystemPolicy(run_dir, RUN))


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "text", ["", "[", '{"run_id": "run-1"', '{"run_id": "run-1", "step": 2}', "[" * 10_000, '"\\ud800"']
)
def test_s91_an_acknowledgement_that_is_none_ends_the_run_by_name(run_dir: Path, text: str) -> None:
    (run_dir / "acks").mkdir()
    (run_dir / "acks/step_000001.json").write_text(text)
    with pytest.raises(TrainerError, match=r"acks/step_000001.json"):
        looks(FilesystemPolicy(run_dir, RUN))
