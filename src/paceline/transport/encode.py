"""A packed batch → the file of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.batch import MicroBatch, PackedBatch
from paceline.domain.mostly_constant import MostlyConstant
from paceline.domain.sample import Sample
from paceline.errors import InvariantError
from paceline.transport.frame import (
    ALIGNMENT,
    DIGESTED,
    DTYPES,
    ENDINGS,
    FORMAT,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
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
    _add_mostly_constant(body, "advantages", [m.advantage for m in micro_batches])
    _add_mostly_constant(body, "temperatures", [m.temperature for m in micro_batches])
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
    for name in ("token_ids", "trainable", "logprobs"):
        length = len(getattr(micro_batch, name))
        if length != tokens:
            raise InvariantError(
                f"micro-batch {number}: {name} has {length} tokens, its lengths add up to {tokens}"
            )
    for name in ("advantage", "temperature"):
        given: MostlyConstant = getattr(micro_batch, name)
        sequences = len(micro_batch.lengths)
        if not len(given.values) == len(given.kinds) == sequences:
            raise InvariantError(
                f"micro-batch {number}: {name} has {len(given.values)} values and {len(given.kinds)} kinds for "
                f"{sequences} sequences"
            )
        if len(given.tokens) != (told := given.token_count(micro_batch.lengths)):
            raise InvariantError(
                f"micro-batch {number}: {name} has {len(given.tokens)} numbers for the {told} tokens of the "
                "sequences that have one a token"
            )
    if len(micro_batch.lengths) and int(micro_batch.lengths.min()) < 1:
        raise InvariantError(
            f"micro-batch {number} has a sequence of {int(micro_batch.lengths.min())} tokens"
        )
    if len(micro_batch.sample_index) > len(micro_batch.lengths):
        raise InvariantError(
            f"micro-batch {number} has {len(micro_batch.sample_index)} samples in {len(micro_batch.lengths)} sequences"
        )


def _add_mostly_constant(body: _Body, name: str, pieces: Sequence[MostlyConstant]) -> None:
    body.add(f"{name}/value", "f4", [piece.values for piece in pieces])
    body.add(f"{name}/kind", "u1", [piece.kinds for piece in pieces])
    body.add(f"{name}/tokens", "f4", [piece.tokens for piece in pieces])


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
