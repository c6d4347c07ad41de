"""The orchestrator's side of the run directory: batches out, weights and acknowledgements in.

Every file operation runs in a thread: a stalled file server must not stall the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from paceline.domain.batch import PackedBatch
from paceline.domain.ids import Version
from paceline.errors import TrainerError, WireError
from paceline.ports import Published, Shipment
from paceline.transport.encode import Encoded, encode
from paceline.transport.frame import PREFIX_BYTES, read_prefix
from paceline.transport.layout import (
    ACKS,
    BATCHES,
    VERSION_FILE,
    WEIGHTS,
    ack_file,
    batch_dir,
    commit_directory,
    rank_file,
    remove,
    steps_in,
    versions_in,
    weights_dir,
    write_file,
)
from paceline.transport.reader import Ack

POLL_S = 0.05


class FilesystemBatches:
    """Puts batches where `read_batches` finds them. A `BatchSink`.

    Shipping a step again is harmless when the content is the same, as after a crash between writing and journalling;
    it is refused when not, because a trainer may have trained on what is there.
    """

    def __init__(self, run_dir: Path | str, run_id: str, *, keep: int = 16) -> None:
        """`keep`: acknowledged batches that stay, for a trainer that goes back to an older checkpoint."""
        self._root = Path(run_dir)
        self._run_id = run_id
        self._keep = keep

    async def ship(self, packed: PackedBatch) -> Shipment:
        """Make a batch durable for every rank. WireError if another one is there already."""
        return await asyncio.to_thread(self._ship, packed)

    def _ship(self, packed: PackedBatch) -> Shipment:
        step = packed.batch.step
        ranks = [encode(packed, rank, run_id=self._run_id) for rank in range(len(packed.ranks))]
        if batch_dir(self._root, step).is_dir():
            self._compare(step, ranks)
        else:

            def fill(folder: Path) -> None:
                for rank, encoded in enumerate(ranks):
                    write_file(folder / rank_file(self._root, step, rank).name, encoded.chunks)

            commit_directory(batch_dir(self._root, step), fill)
        self._forget_acknowledged()
        return Shipment(sum(encoded.nbytes for encoded in ranks), tuple(encoded.digest for encoded in ranks))

    def _compare(self, step: int, ranks: list[Encoded]) -> None:
        folder = batch_dir(self._root, step)
        there = len(list(folder.iterdir()))
        if there != len(ranks):
            raise WireError(f"{folder} holds {there} ranks, the batch to ship has {len(ranks)}: {_REMEDY}")
        for rank, encoded in enumerate(ranks):
            found = digest_of(path := rank_file(self._root, step, rank))
            if found != encoded.digest:
                raise WireError(
                    f"{path} has content {found[:16]}…, the batch to ship {encoded.digest[:16]}…: {_REMEDY}"
                )

    def _forget_acknowledged(self) -> None:
        acknowledged = steps_in(self._root / ACKS)
        if acknowledged:
            for step in steps_in(self._root / BATCHES):
                if step <= acknowledged[-1] - self._keep:
                    remove(batch_dir(self._root, step))


def digest_of(path: Path) -> str:
    """What a rank's file says that it holds. WireError if it is none."""
    with open(path, "rb") as file:
        return read_prefix(file.read(PREFIX_BYTES), name=str(path)).digest


_REMEDY = (
    "it was shipped before, and the trainer may have trained on it; resume from a checkpoint before that step, "
    "or give the run a directory of its own"
)


_UNREADABLE = (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What `_stated` raises of a file that is not there, or is not whole."""


def _stated(path: Path) -> dict[str, Any]:
    """What published weights say of themselves."""
    facts: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return facts


def check_weights(run_dir: Path, version: Version, run_id: str) -> None:
    """WireError unless published weights say themselves that they are this version, of this run: a directory may have been
    copied or renamed, and whatever is in it would be taken for the policy."""
    path = weights_dir(run_dir, version) / VERSION_FILE
    try:
        facts = _stated(path)
    except _UNREADABLE as error:
        raise WireError(
            f"{path} does not say which version these weights are: {error}; put back those of v{version:06d}"
        ) from error
    said = facts.get("version"), facts.get("run_id")
    if said != (version, run_id):
        raise WireError(
            f"{path} says version {said[0]} of run {said[1]!r}, but its directory is v{version:06d} of run {run_id!r}: put "
            f"back the weights of v{version:06d}, or remove them and the trainer's checkpoint, to go on from the one before"
        )


class FilesystemPolicy:
    """Watches for weights and acknowledgements. A `PolicySource`.

    It polls because no network file system reports another machine's files; one look is two directory listings, each
    of a few entries, so 20 looks a second cost a few thousandths of a core. Unfinished directories have a name that
    is not looked at, or no `version.json`; a directory that vanishes while it is read is skipped.
    """

    def __init__(
        self,
        run_dir: Path | str,
        run_id: str,
        *,
        after: int = 0,
        acknowledged: int | None = None,
        keep_acks: int = 64,
        poll_s: float = POLL_S,
    ) -> None:
        """`after`: the version that the run goes on from; only later ones are reported. `acknowledged`: the last step
        that was reported before, when that is an earlier one."""
        self._root = Path(run_dir)
        self._run_id = run_id
        self._version: Version = after
        self._step = after if acknowledged is None else min(after, acknowledged)
        self._keep_acks = keep_acks
        self._poll_s = poll_s
        self._found: deque[Published] = deque()
        self._looking = Lock()

    async def next(self) -> Published:
        """The next acknowledgement or version, each once, in order. TrainerError if one is of another run."""
        while not self._found:
            await asyncio.to_thread(self._look)
            if not self._found:
                await asyncio.sleep(self._poll_s)
        return self._found.popleft()

    def _look(self) -> None:
        """Find what is new. A step's acknowledgement comes before the version it made, when both are there."""
        # A cancelled `next` leaves its look behind in the thread: what that finds is kept for the next one.
        with self._looking:
            self._found.extend(self._news())

    def _news(self) -> list[Published]:
        found: list[tuple[int, int, Published]] = []
        acks = steps_in(self._root / ACKS)
        for step in acks:
            if step > self._step and (ack := self._ack(step)) is not None:
                metrics = {name: math.nan if v is None else v for name, v in ack.metrics.items()}
                found.append((step, 0, Published(trained_step=step, metrics=metrics)))
                self._step = step
        for version in versions_in(self._root / WEIGHTS):
            if version > self._version and self._is_complete(version):
                path = str(weights_dir(self._root, version))
                found.append((version, 1, Published(version=version, path=path)))
                self._version = version
        for step in acks:
            if step <= self._step - self._keep_acks:
                remove(ack_file(self._root, step))
        return [published for _, _, published in sorted(found, key=lambda entry: entry[:2])]

    def _ack(self, step: int) -> Ack | None:
        path = ack_file(self._root, step)
        try:
            ack = msgspec.json.decode(path.read_bytes(), type=Ack)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TrainerError(f"{path} is no acknowledgement: {error}") from error
        self._check_run(path, ack.run_id)
        if ack.step != step:
            raise TrainerError(f"{path} acknowledges step {ack.step}, not what its name says")
        return ack

    def _is_complete(self, version: Version) -> bool:
        path = weights_dir(self._root, version) / VERSION_FILE
        try:
            facts = _stated(path)
        except _UNREADABLE:
            # Not there yet, half written by a trainer that does not rename, or gone again: look once more later.
            return False
        self._check_run(path, facts.get("run_id"))
        if facts.get("version") != version:
            raise TrainerError(f"{path} says version {facts.get('version')}, its directory v{version:06d}")
        return True

    def _check_run(self, path: Path, run_id: str | None) -> None:
        if run_id != self._run_id:
            raise TrainerError(
                f"{path} is of run {run_id!r}, this is run {self._run_id!r}: start a trainer of this run (weights go "
                "out with paceline.publish_weights), and remove what another run left or use another directory"
            )
