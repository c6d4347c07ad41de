"""`paceline export RUN --parquet DIR`: rollouts and turns as Parquet. `docs/journal.md` lists the columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.errors import ConfigError
from paceline.journal import read_journal, read_rollouts
from paceline.observe.rollouts import RolloutRow, RolloutRows

Pair: TypeAlias = tuple[RolloutRow, Rollout | None]
"""What the log tells of a rollout, and what the store has; None where it was dropped."""

_BATCH = 256
"""Rollouts of a row group: token arrays of these are in memory at once."""


def write_parquet(run_dir: Path, folder: Path) -> tuple[int, int, int]:
    """Write `rollouts.parquet` and `turns.parquet`; returns their numbers of rows, and of rollouts whose tokens are not in
    the store. A rollout that ran again after a resume is written once, the last time. ConfigError without pyarrow, OSError
    from the disk."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "`paceline export --parquet` needs pyarrow, which is not installed: pip install 'paceline[parquet]'"
        )
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = RolloutRows()
    for record in read_journal(run_dir):
        rows.apply(record.at, record.event, record.commands)
    schemas = _schemas(pa)
    folder.mkdir(parents=True, exist_ok=True)
    counts = [0, 0]
    bare = 0
    with (
        pq.ParquetWriter(folder / "rollouts.parquet", schemas[0], compression="zstd") as rollouts,
        pq.ParquetWriter(folder / "turns.parquet", schemas[1], compression="zstd") as turns,
    ):
        for some in _batches(run_dir, rows.rows):
            bare += sum(stored is None for _, stored in some)
            tables = (
                (rollouts, [_rollout(row, stored) for row, stored in some]),
                (turns, [t for row, stored in some if stored is not None for t in _turns(row, stored)]),
            )
            for number, (writer, found) in enumerate(tables):
                counts[number] += len(found)
                if found:
                    writer.write_table(pa.Table.from_pylist(found, schema=schemas[number]))
    return counts[0], counts[1], bare


def _batches(run_dir: Path, rows: Mapping[RolloutId, RolloutRow]) -> Iterator[list[Pair]]:
    """In the order of the store, which is read once; what it has dropped comes last, without tokens."""
    left = dict(rows)
    batch: list[Pair] = []
    for rollout in read_rollouts(run_dir):
        row = left.get(rollout.id)
        if row is None or row.ended != rollout.ended:
            continue  # the log does not know it, or it ran again later
        del left[rollout.id]
        batch.append((row, rollout))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield [*batch, *[(row, None) for row in left.values()]]


def _rollout(row: RolloutRow, stored: Rollout | None) -> dict[str, Any]:
    more: dict[str, Any] = {"detail": "", "messages": None, "metrics": None, "rewards": None, "info": None}
    if stored is not None:
        more = {
            "detail": stored.outcome.detail,
            "messages": [{"role": m.role, "content": m.content} for m in stored.messages],
            "metrics": list(stored.metrics.items()),
            "rewards": list(stored.rewards.items()),
            "info": msgspec.json.encode(stored.info).decode(),
        }
    return msgspec.structs.asdict(row) | more


def _turns(row: RolloutRow, stored: Rollout) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(stored.turns):
        versions = np.repeat(
            np.array([v for v, _ in turn.versions], dtype=np.int32), [n for _, n in turn.versions]
        )
        yield {
            "rollout": row.rollout,
            "turn": number,
            "extends": turn.extends,
            "after": turn.after,
            "prompt_ids": turn.prompt_ids,
            "sampled_ids": turn.sampled_ids,
            "logprobs": turn.logprobs,
            "versions": versions,
            "finish": turn.finish,
            "engine": turn.engine,
            "cached_tokens": turn.cached_tokens,
            "queued_s": turn.queued_s,
            "started": turn.started,
            "ended": turn.ended,
            "segments": turn.segments,
        }


def _schemas(pa: Any) -> tuple[Any, Any]:
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    numbers = pa.map_(text, real)
    message = pa.struct([("role", text), ("content", text)])
    kinds = {"str": text, "int": whole, "float": real}
    columns = []
    for field in msgspec.structs.fields(RolloutRow):
        said = str(RolloutRow.__annotations__[field.name])
        columns.append((field.name, kinds[said.removesuffix(" | None")]))
    columns += [("detail", text), ("messages", pa.list_(message))]
    columns += [("metrics", numbers), ("rewards", numbers), ("info", text)]
    ids = pa.list_(pa.int32())
    turn = [
        ("rollout", text),
        ("turn", pa.int32()),
        ("extends", pa.bool_()),
        ("after", pa.int32()),
        ("prompt_ids", ids),
        ("sampled_ids", ids),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", ids),
        ("finish", text),
        ("engine", text),
        ("cached_tokens", whole),
        ("queued_s", real),
        ("started", real),
        ("ended", real),
        ("segments", pa.int32()),
    ]
    return pa.schema(columns), pa.schema(turn)
