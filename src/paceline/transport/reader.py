"""The trainer's side: batches in, acknowledgements and weights out. For any trainer; needs numpy alone.

    for batch in paceline.read_batches("runs/my-run", rank=0):
        for micro_batch in batch.micro_batches:
            ...                                         # forward, backward; numpy, or torch with as_torch=True
        optimizer.step()
        paceline.publish_weights("runs/my-run", batch.step, save)    # save(directory) writes the model's files
        batch.ack({"loss": loss})

The loop ends when the run does. A trainer that is started again goes on behind the last acknowledged step, or where
its own checkpoint says (`start_step`), as long as those batches are kept.

Waiting is polling, because no network file system tells another machine about a new file: one look at the next
batch's name each `POLL_S`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import PacelineError, WireError
from paceline.transport.decode import decode
from paceline.transport.frame import PREFIX_BYTES, read_prefix
from paceline.transport.layout import (
    ACKS,
    BATCHES,
    TRAINER_WAITS,
    VERSION_FILE,
    WEIGHTS,
    ack_file,
    batch_dir,
    commit_directory,
    rank_file,
    remove,
    replace_file,
    steps_in,
    versions_in,
    weights_dir,
)
from paceline.transport.rank_batch import RankBatch, SampleTable, WireMicroBatch
from paceline.transport.status import read_status

POLL_S = 0.02


class BatchTimeout(PacelineError, TimeoutError):
    """No batch came within the time that `read_batches` was given."""


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """What an acknowledgement file holds."""

    run_id: str
    step: int
    digest: str = ""
    """Of rank 0's batch: what was trained, not only which number."""
    metrics: dict[str, float | None] = {}
    """None stands for a number that is not finite, for which JSON has no word."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchMicroBatch:
    """A `WireMicroBatch` as tensors of the same names and types; they share memory with the batch."""

    token_ids: Any
    trainable: Any
    logprobs: Any
    advantages: Any
    temperatures: Any
    lengths: Any
    position_ids: Any
    boundaries: Any
    streams: Mapping[str, Any]
    samples: SampleTable

    @classmethod
    def of(cls, source: WireMicroBatch) -> TorchMicroBatch:
        from torch import from_numpy

        arrays = {
            name: from_numpy(getattr(source, name))
            for name in cls.__slots__
            if name not in ("streams", "samples")
        }
        streams = {name: from_numpy(values) for name, values in source.streams.items()}
        return cls(**arrays, streams=streams, samples=source.samples)


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedBatch:
    """What one rank trains on in one step, with the way to say that it did."""

    run_dir: Path
    content: RankBatch
    micro_batches: tuple[Any, ...]
    """`WireMicroBatch`, or `TorchMicroBatch` when read with `as_torch`."""

    @property
    def step(self) -> int:
        return self.content.step

    @property
    def trains(self) -> int:
        """The version this batch trains; the step makes version `step`."""
        return self.content.trains

    @property
    def run_id(self) -> str:
        return self.content.run_id

    @property
    def rank(self) -> int:
        return self.content.rank

    @property
    def ranks(self) -> int:
        return self.content.ranks

    @property
    def samples(self) -> SampleTable:
        return self.content.samples

    def ack(self, metrics: Mapping[str, float] | None = None) -> None:
        """Say that the step is done. Rank 0 speaks for all; on other ranks this does nothing."""
        if self.rank != 0:
            return
        ack = Ack(
            run_id=self.run_id,
            step=self.step,
            digest=self.content.digest,
            metrics={name: float(value) for name, value in (metrics or {}).items()},
        )
        replace_file(ack_file(self.run_dir, self.step), msgspec.json.encode(ack) + b"\n")


def read_batches(
    run_dir: Path | str,
    *,
    rank: int = 0,
    start_step: int | None = None,
    as_torch: bool = False,
    streams: Sequence[str] | None = None,
    timeout: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[ReceivedBatch]:
    """Yield the batches of one rank in order of steps, waiting for each, until the run ends.

    `start_step` None goes on behind the last acknowledged step. `streams` picks optional per-token streams by name
    (None: all there are). `timeout` is the seconds to wait for one batch, then `BatchTimeout`. `stop` is asked while
    waiting; True ends the iteration. WireError names a batch that is damaged, of another run, or no longer kept.
    """
    root = Path(run_dir)
    step = start_step if start_step is not None else max([0, *steps_in(root / ACKS)]) + 1
    while _wait(root, step, timeout, stop):
        yield _received(root, step, rank, as_torch, streams)
        step += 1


def _wait(root: Path, step: int, timeout: float | None, stop: Callable[[], bool] | None) -> bool:
    """True once the step's batch is there, False when none will come."""
    end = None if timeout is None else time.monotonic() + timeout
    folder = batch_dir(root, step)
    while True:
        # The status is read before the batch is looked for: a last batch and the end may come between the two.
        status = read_status(root)
        if folder.is_dir():
            return True
        kept = steps_in(root / BATCHES)
        if kept and kept[0] > step:
            raise WireError(
                f"{folder} is no longer kept; the oldest batch there is of step {kept[0]}: go on from a later "
                "checkpoint, or keep more batches"
            )
        if (status is not None and status.has_ended) or (stop is not None and stop()):
            return False
        if end is not None and time.monotonic() >= end:
            raise BatchTimeout(f"no batch of step {step} in {root} within {timeout:g} s")
        time.sleep(POLL_S)


def _received(
    root: Path, step: int, rank: int, as_torch: bool, streams: Sequence[str] | None
) -> ReceivedBatch:
    path = rank_file(root, step, rank)
    try:
        data = _read(path)
    except FileNotFoundError:
        there = sorted(entry.name for entry in batch_dir(root, step).iterdir())
        raise WireError(
            f"{path} does not exist: step {step} was packed for {len(there)} ranks ({', '.join(there)}); "
            "batch.ranks of the run and the trainer's ranks must agree"
        ) from None
    content = decode(data if as_torch else memoryview(data).toreadonly(), name=str(path), streams=streams)
    if (content.step, content.rank) != (step, rank):
        raise WireError(f"{path} holds step {content.step}, rank {content.rank}, not what its name says")
    status = read_status(root)
    if status is not None and status.run_id != content.run_id:
        raise WireError(
            f"{path} is of run {content.run_id!r}, the directory belongs to run {status.run_id!r}: "
            "remove what the other run left, or give this run a directory of its own"
        )
    micro_batches = content.micro_batches
    return ReceivedBatch(
        root, content, tuple(map(TorchMicroBatch.of, micro_batches)) if as_torch else micro_batches
    )


def _read(path: Path) -> bytearray:
    """The file's bytes. What it says about its own size is checked before memory is reserved for it."""
    with open(path, "rb") as file:
        start = file.read(PREFIX_BYTES)
        stated = read_prefix(start, name=str(path)).file_bytes
        size = os.fstat(file.fileno()).st_size
        if stated != size:
            raise WireError(f"{path} is cut off or has grown: {size} bytes, its prefix states {stated}")
        data = bytearray(size)
        data[:PREFIX_BYTES] = start
        filled = PREFIX_BYTES
        while filled < size:
            count = file.readinto(memoryview(data)[filled:])
            if not count:
                raise WireError(f"{path} ended at byte {filled} of {size} while it was read")
            filled += count
    return data


def publish_weights(
    run_dir: Path | str,
    version: int,
    write: Callable[[Path], None],
    run_id: str | None = None,
    *,
    keep: int | None = None,
) -> Path:
    """Publish a version; returns its directory, which appears at once and whole.

    `write` puts the model's files (as an engine loads them) into the directory it is given. `version.json` is added:
    what `write` put there is kept, version and run id are set. `run_id` None takes the run directory's. `keep`
    removes all but the newest so many versions; keep at least as many as the run may lag, plus one.
    """
    root = Path(run_dir)
    if version < 1:
        raise WireError(f"version {version} cannot be published: v0 is the initial policy, step n makes vn")
    if run_id is None:
        status = read_status(root)
        if status is None:
            raise WireError(f"{root} has no run status yet, so the run id is unknown: pass run_id")
        run_id = status.run_id

    def fill(folder: Path) -> None:
        write(folder)
        stated = folder / VERSION_FILE
        facts = msgspec.json.decode(stated.read_bytes(), type=dict[str, Any]) if stated.exists() else {}
        stated.write_bytes(msgspec.json.encode({**facts, "version": version, "run_id": run_id}) + b"\n")

    path = weights_dir(root, version)
    commit_directory(path, fill)
    if keep is not None:
        older = [v for v in versions_in(root / WEIGHTS) if v <= version]
        for old in older[: -max(1, keep)]:
            remove(weights_dir(root, old))
    return path


def discard_unfinished(run_dir: Path | str) -> None:
    """Remove what an interrupted `publish_weights` or `write_with_room` left; call it when a trainer starts, before it publishes."""
    folder = Path(run_dir) / WEIGHTS
    if folder.is_dir():
        for entry in folder.glob(".v*.tmp"):
            shutil.rmtree(entry, ignore_errors=True)
    (Path(run_dir) / TRAINER_WAITS).unlink(missing_ok=True)
