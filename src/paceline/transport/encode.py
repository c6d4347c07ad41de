"""A packed batch → the file of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.batch import MicroBatch, PackedBatch
from paceline.domain.sample import Sample
from paceline.errors import InvariantError
from paceline.transport.frame import (
    ALIGNMENT,
    DIGESTED,
    DTYPES,
    ENDINGS,
    FORMAT,
    MAGIC,
    PER_SEQUENCE,
    PER_TOKEN,
    PREFIX,
    PREFIX_BYTES,
    WHERE_TRAINABLE,
    Buffer,
    Header,
)


class Encoded(NamedTuple):
    """One rank's file, as pieces to be written one after the other."""

    chunks: list[Buffer]
    nbytes: int
    digest: str
    """Hex; of everything a reader sees, so equal digests are equal batches."""


class _Body:
    """Collects arrays, each as the pieces it already is in: nothing is concatenated to be sent."""

    def __init__(self) -> None:
        self.arrays: list[tuple[str, str, tuple[int, ...], int]] = []
        self.chunks: list[Buffer] = []
        self.nbytes = 0

    def add(self, name: str, dtype: str, pieces: Sequence[NDArray[Any]], tail: tuple[int, ...] = ()) -> None:
        padding = -self.nbytes % ALIGNMENT
        if padding:
            self._append(bytes(padding))
        rows = sum(len(piece) for piece in pieces)
        self.arrays.append((name, dtype, (rows, *tail), self.nbytes))
        for piece in pieces:
            if piece.size:
                plain = np.ascontiguousarray(piece, dtype=DTYPES[dtype])
                self._append(plain.reshape(-1).view(np.uint8).data)

    def _append(self, chunk: Buffer) -> None:
        self.chunks.append(chunk)
        self.nbytes += len(chunk)


def encode(packed: PackedBatch, rank: int, *, run_id: str) -> Encoded:
    """The file of one rank. InvariantError if packing and samples disagree: such a batch must not ship."""
    micro_batches = packed.ranks[rank]
    for number, micro_batch in enumerate(micro_batches):
        _check(number, micro_batch)
    body = _Body()
    lengths = _joined([m.lengths for m in micro_batches], np.int32)
    trainable = _joined([m.trainable for m in micro_batches], np.bool_)
    body.add("sequences", "i4", [np.array([len(m.lengths) for m in micro_batches], np.int32)])
    body.add("samples", "i4", [np.array([len(m.sample_index) for m in micro_batches], np.int32)])
    body.add("lengths", "i4", [lengths])
    body.add("token_ids", "i4", [m.token_ids for m in micro_batches])
    body.add("trainable_bits", "u1", [np.packbits(trainable)])
    body.add("logprobs", "f4", [m.logprobs for m in micro_batches])
    _add_mostly_constant(body, "advantages", [m.advantages for m in micro_batches], lengths, trainable)
    _add_mostly_constant(body, "temperatures", [m.temperatures for m in micro_batches], lengths, trainable)
    envs = _add_samples(body, packed, micro_batches)
    _add_streams(body, micro_batches)
    header = Header(
        run=run_id,
        step=packed.batch.step,
        trains=packed.batch.trains,
        rank=rank,
        ranks=len(packed.ranks),
        envs=envs,
        endings=ENDINGS,
        arrays=tuple(body.arrays),
    )
    return _framed(header, body)


def _framed(header: Header, body: _Body) -> Encoded:
    text = msgspec.json.encode(header)
    head = text + b" " * (-len(text) % ALIGNMENT)
    nbytes = PREFIX_BYTES + len(head) + body.nbytes
    prefix = PREFIX.pack(MAGIC, FORMAT, 0, len(head), nbytes, bytes(32))
    digest = hashlib.blake2b(prefix[:DIGESTED], digest_size=32)
    for chunk in (head, *body.chunks):
        digest.update(chunk)
    prefix = PREFIX.pack(MAGIC, FORMAT, 0, len(head), nbytes, digest.digest())
    return Encoded([prefix, head, *body.chunks], nbytes, digest.hexdigest())


def _joined(pieces: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(p, dtype) for p in pieces]) if pieces else np.zeros(0, dtype)


def _check(number: int, micro_batch: MicroBatch) -> None:
    tokens = int(micro_batch.lengths.sum())
    for name in ("token_ids", "trainable", "logprobs", "advantages", "temperatures"):
        length = len(getattr(micro_batch, name))
        if length != tokens:
            raise InvariantError(
                f"micro-batch {number}: {name} has {length} tokens, its lengths add up to {tokens}"
            )
    if len(micro_batch.lengths) and int(micro_batch.lengths.min()) < 1:
        raise InvariantError(
            f"micro-batch {number} has a sequence of {int(micro_batch.lengths.min())} tokens"
        )
    if len(micro_batch.sample_index) > len(micro_batch.lengths):
        raise InvariantError(
            f"micro-batch {number} has {len(micro_batch.sample_index)} samples in {len(micro_batch.lengths)} sequences"
        )


def _add_mostly_constant(
    body: _Body,
    name: str,
    pieces: Sequence[NDArray[np.float32]],
    lengths: NDArray[np.int32],
    trainable: NDArray[np.bool_],
) -> None:
    """One value a sequence where that says all, else a value a token; exact to the bit, NaN included."""
    if not len(lengths):
        values, kinds, left = np.zeros(0, np.float32), np.zeros(0, np.uint8), np.zeros(0, np.float32)
    else:
        numbers = _joined(pieces, np.float32)
        values, kinds = _constants(numbers, lengths, trainable)
        left = numbers[np.repeat(kinds == PER_TOKEN, lengths)] if (kinds == PER_TOKEN).any() else numbers[:0]
    body.add(f"{name}/value", "f4", [values])
    body.add(f"{name}/kind", "u1", [kinds])
    body.add(f"{name}/tokens", "f4", [left])


def _constants(
    numbers: NDArray[np.float32], lengths: NDArray[np.int32], trainable: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    bits = numbers.view(np.int32)  # compared as bits: NaN equals itself and -0.0 is not 0.0
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    low, high = np.minimum.reduceat(bits, starts), np.maximum.reduceat(bits, starts)
    kinds = np.where(low == high, PER_SEQUENCE, PER_TOKEN).astype(np.uint8)
    if not kinds.any():
        return low.view(np.float32), kinds
    ends = np.iinfo(np.int32)
    low_t = np.minimum.reduceat(np.where(trainable, bits, ends.max), starts)
    high_t = np.maximum.reduceat(np.where(trainable, bits, ends.min), starts)
    # Masking by multiplication leaves -0.0 where a negative number was: 0 all the same.
    elsewhere = np.logical_or.reduceat((numbers != 0) & ~trainable, starts)
    masked = (kinds == PER_TOKEN) & (low_t == high_t) & ~elsewhere
    kinds[masked] = WHERE_TRAINABLE
    values = np.where(kinds == PER_SEQUENCE, low, np.where(masked, low_t, 0)).astype(np.int32)
    return values.view(np.float32), kinds


def _add_samples(body: _Body, packed: PackedBatch, micro_batches: Sequence[MicroBatch]) -> tuple[str, ...]:
    """The sample table: row i is the i-th sequence that is no padding."""
    index = _joined([m.sample_index for m in micro_batches], np.int32)
    rows: list[Sample] = [packed.batch.samples[i] for i in index.tolist()]
    envs = tuple(dict.fromkeys(row.env for row in rows))
    env_code = {name: code for code, name in enumerate(envs)}
    runs = [run for row in rows for run in row.versions]
    _check_versions(micro_batches, rows)

    def column(name: str, dtype: str, values: list[Any]) -> None:
        body.add(f"sample/{name}", dtype, [np.array(values, DTYPES[dtype])])

    body.add("sample/position", "i4", [index])
    column("group", "i8", [row.rollout.group for row in rows])
    column("member", "i4", [row.rollout.member for row in rows])
    column("attempt", "i4", [row.rollout.attempt for row in rows])
    column("task", "i8", [row.task_index for row in rows])
    column("env", "i4", [env_code[row.env] for row in rows])
    column("ending", "u1", [ENDINGS.index(row.ending) for row in rows])
    column("reward", "f8", [row.reward for row in rows])
    column("cut_tokens", "i4", [row.cut_tokens for row in rows])
    column("version_runs", "i4", [len(row.versions) for row in rows])
    body.add("versions", "i4", [np.array(runs, np.int32).reshape(-1, 2)], (2,))
    return envs


def _check_versions(micro_batches: Sequence[MicroBatch], rows: Sequence[Sample]) -> None:
    """Every trainable token has one version, or staleness would be wrong in what the trainer reports."""
    at = 0
    for number, micro_batch in enumerate(micro_batches):
        if not len(micro_batch.lengths):
            continue
        starts = np.cumsum(micro_batch.lengths, dtype=np.int64) - micro_batch.lengths
        trains = np.add.reduceat(micro_batch.trainable, starts, dtype=np.int64).tolist()
        for sequence, tokens in enumerate(trains):
            is_sample = sequence < len(micro_batch.sample_index)
            stated = rows[at + sequence].trainable_tokens if is_sample else 0
            if tokens != stated:
                what = str(rows[at + sequence].rollout) if is_sample else "padding"
                raise InvariantError(
                    f"micro-batch {number}, sequence {sequence} ({what}): {tokens} trainable tokens, "
                    f"but versions for {stated}"
                )
        at += len(micro_batch.sample_index)


def _add_streams(body: _Body, micro_batches: Sequence[MicroBatch]) -> None:
    names = list(micro_batches[0].streams) if micro_batches else []
    for number, micro_batch in enumerate(micro_batches):
        if set(micro_batch.streams) != set(names):
            raise InvariantError(
                f"micro-batch {number} has streams {sorted(micro_batch.streams)}, micro-batch 0 has {sorted(names)}"
            )
    for name in sorted(names):
        pieces: list[NDArray[Any]] = [m.streams[name] for m in micro_batches]
        dtype = pieces[0].dtype.str[1:]
        if dtype not in DTYPES:
            raise InvariantError(f"stream {name!r} is {pieces[0].dtype}, which the wire has no type for")
        for piece, micro_batch in zip(pieces, micro_batches, strict=True):
            if len(piece) != len(micro_batch.token_ids) or piece.shape[1:] != pieces[0].shape[1:]:
                raise InvariantError(
                    f"stream {name!r} is {piece.shape} for {len(micro_batch.token_ids)} tokens "
                    f"and {pieces[0].shape[1:]} a token elsewhere"
                )
        body.add(f"stream/{name}", dtype, pieces, pieces[0].shape[1:])
