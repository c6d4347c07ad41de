"""The batches of a run, made again from what its journal and rollout store hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config import BatchSection
from paceline.core.packing import pack
from paceline.core.recovery import EMPTY, Recovery
from paceline.domain.batch import Batch
from paceline.domain.commands import ShipBatch
from paceline.journal import read_extras, read_journal, read_rollouts
from paceline.transport.encode import encode


def batches_of(run_dir: Path) -> Iterator[Batch]:
    """Each batch, as it is owed behind the record that cut it."""
    rollouts = {rollout.id: rollout for rollout in read_rollouts(run_dir)}
    extras, recovery = read_extras(run_dir), Recovery(EMPTY)
    for record in read_journal(run_dir):
        recovery.apply(*record)
        steps = [c.batch.step for c in record.commands if isinstance(c, ShipBatch)]
        for owed in recovery.owed(rollouts, extras) if steps else ():
            if isinstance(owed, ShipBatch) and owed.batch.step in steps:
                yield owed.batch


def files_of(batch: Batch, settings: BatchSection, run_id: str) -> list[bytes]:
    """What each rank's file of the batch holds."""
    packed = pack(
        batch,
        ranks=settings.data_parallel,
        micro_batch_tokens=settings.micro_batch_tokens or settings.seq_len,
        pad_to_multiple_of=settings.pad_to_multiple_of,
    )
    encoded = [encode(packed, rank, run_id=run_id) for rank in range(settings.data_parallel)]
    return [b"".join(map(bytes, each.chunks)) for each in encoded]
