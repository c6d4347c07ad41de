"""The file of one rank → arrays that are views of it. Believes nothing that the bytes do not bear out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.mostly_constant import PER_TOKEN, MostlyConstant
from paceline.errors import WireError
from paceline.transport.frame import (
    ALIGNMENT,
    DIGESTED,
    DTYPES,
    PREFIX_BYTES,
    Buffer,
    Header,
    read_prefix,
)
from paceline.transport.rank_batch import RankBatch, SampleTable, WireMicroBatch


def decode(data: Buffer, *, name: str = "<buffer>", streams: Sequence[str] | None = None) -> RankBatch:
    """The batch in `data`, as views of it: keep `data` unchanged while they are used.

    `name` is what errors call it. `streams` picks optional streams by name (WireError if one is missing); None
    takes all that are there. Arrays can be written to exactly when `data` can.
    """
    prefix = read_prefix(data, name=name)
    if prefix.file_bytes != len(data):
        raise WireError(
            f"{name} is cut off or has grown: {len(data)} bytes, its prefix states {prefix.file_bytes}"
        )
    view = memoryview(data).cast("B")
    digest = hashlib.blake2b(view[:DIGESTED], digest_size=32)
    digest.update(view[PREFIX_BYTES:])
    if digest.hexdigest() != prefix.digest:
        raise WireError(
            f"{name} is damaged: its content has digest {digest.hexdigest()[:16]}…, "
            f"its prefix states {prefix.digest[:16]}…"
        )
    body_at = PREFIX_BYTES + prefix.header_bytes
    try:
        header = msgspec.json.decode(view[PREFIX_BYTES:body_at], type=Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{name} has a header that cannot be read: {error}") from error
    return _Decoder(name, header, view[body_at:]).batch(prefix.digest, streams)


class _Decoder:
    """Turns a header and bytes into arrays, believing neither."""

    def __init__(self, name: str, header: Header, body: memoryview) -> None:
        self.name = name
        self.header = header
        self.body = body
        self.arrays = {entry[0]: entry for entry in header.arrays}

    def batch(self, digest: str, streams: Sequence[str] | None) -> RankBatch:
        if self.header.step < 1 or not 0 <= self.header.rank < self.header.ranks:
            raise WireError(
                f"{self.name} says step {self.header.step}, rank {self.header.rank} of {self.header.ranks}: "
                "steps count from 1, ranks from 0"
            )
        sequences, samples = self.array("sequences", "i4"), self.array("samples", "i4")
        lengths = self.array("lengths", "i4")
        self._same("micro-batches in `samples`", len(samples), "in `sequences`", len(sequences))
        self._at_least("sequences of a micro-batch", sequences, 0)
        self._at_least("samples of a micro-batch", samples, 0)
        self._at_least("length of a sequence", lengths, 1)
        self._same("lengths", len(lengths), "sequences", int(sequences.sum(dtype=np.int64)))
        if (samples > sequences).any():
            raise WireError(f"{self.name}: a micro-batch has more samples than sequences")
        tokens = int(lengths.sum(dtype=np.int64))
        token_ids = self.array("token_ids", "i4", rows=tokens)
        bits = self.array("trainable_bits", "u1", rows=(tokens + 7) // 8)
        trainable = np.unpackbits(bits, count=tokens).view(np.bool_)
        logprobs = self.array("logprobs", "f4", rows=tokens)
        advantages = self._mostly_constant("advantages", lengths)
        temperatures = self._mostly_constant("temperatures", lengths)
        is_sample = _leading(samples, sequences)
        trains = (
            np.add.reduceat(trainable, np.cumsum(lengths, dtype=np.int64) - lengths, dtype=np.int32)
            if len(lengths)
            else np.zeros(0, np.int32)
        )
        table = self._table(
            lengths[is_sample],
            trains[is_sample].astype(np.int32),
            advantages.scalars()[is_sample],
            temperatures.scalars()[is_sample],
        )
        if trains[~is_sample].any():
            raise WireError(
                f"{self.name}: padding has {int(trains[~is_sample].sum())} trainable tokens, not 0"
            )
        extra = self._streams(streams, tokens)
        micro_batches = []
        token_at = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        sequence_at = sample_at = 0
        counts = sequences.tolist()
        parts = zip(
            counts,
            samples.tolist(),
            advantages.split(counts, lengths),
            temperatures.split(counts, lengths),
            strict=True,
        )
        for count, rows, advantage, temperature in parts:
            mine = slice(sequence_at, sequence_at + count)
            start, stop = int(token_at[mine.start]), int(token_at[mine.stop])
            micro_batches.append(
                WireMicroBatch(
                    token_ids=token_ids[start:stop],
                    trainable=trainable[start:stop],
                    logprobs=logprobs[start:stop],
                    lengths=lengths[mine],
                    samples=table.rows(sample_at, sample_at + rows),
                    streams={key: value[start:stop] for key, value in extra.items()},
                    advantages=advantage,
                    temperatures=temperature,
                )
            )
            sequence_at, sample_at = mine.stop, sample_at + rows
        header = self.header
        return RankBatch(
            run_id=header.run,
            step=header.step,
            trains=header.trains,
            rank=header.rank,
            ranks=header.ranks,
            digest=digest,
            micro_batches=tuple(micro_batches),
            samples=table,
        )

    def array(
        self, name: str, dtype: str | None, rows: int | None = None, tail: tuple[int, ...] | None = ()
    ) -> NDArray[Any]:
        """One array by name, of that dtype, number of rows and shape of a row; None takes what is there."""
        if name not in self.arrays:
            raise WireError(
                f"{self.name} has no array {name!r}; it has {', '.join(sorted(self.arrays)) or 'none'}"
            )
        _, code, shape, offset = self.arrays[name]
        if code not in DTYPES or (dtype is not None and code != dtype):
            allowed = dtype or f"one of {', '.join(DTYPES)}"
            raise WireError(f"{self.name}: array {name!r} has dtype {code!r}, expected {allowed}")
        is_array = 0 < len(shape) <= 8 and shape[0] >= 0 and min(shape[1:], default=1) >= 1
        if not is_array or (tail is not None and shape[1:] != tail):
            expected = ["rows", *(tail or ())]
            raise WireError(f"{self.name}: array {name!r} has shape {list(shape)}, expected {expected}")
        count = 1
        for size in shape:
            count *= size
        nbytes = count * DTYPES[code].itemsize
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > len(self.body):
            raise WireError(
                f"{self.name}: array {name!r} lies at bytes {offset} to {offset + nbytes}, "
                f"but {len(self.body)} bytes of arrays are there, aligned to {ALIGNMENT}"
            )
        if rows is not None:
            self._same(f"rows of {name!r}", shape[0], "expected", rows)
        return np.frombuffer(self.body, DTYPES[code], count, offset).reshape(shape)

    def _same(self, what: str, found: int, other: str, expected: int) -> None:
        if found != expected:
            raise WireError(f"{self.name}: {found} {what}, but {expected} {other}")

    def _at_least(self, what: str, values: NDArray[Any], least: int) -> None:
        if len(values) and int(values.min()) < least:
            raise WireError(f"{self.name}: {what} is {int(values.min())}, at least {least} expected")

    def _mostly_constant(self, name: str, lengths: NDArray[np.int32]) -> MostlyConstant:
        values = self.array(f"{name}/value", "f4", rows=len(lengths))
        kinds = self.array(f"{name}/kind", "u1", rows=len(lengths))
        if len(kinds) and int(kinds.max()) > PER_TOKEN:
            raise WireError(f"{self.name}: {name}/kind is {int(kinds.max())}, at most {PER_TOKEN} is known")
        found = MostlyConstant(values, kinds, np.zeros(0, np.float32))
        return found._replace(tokens=self.array(f"{name}/tokens", "f4", rows=found.token_count(lengths)))

    def _table(
        self,
        tokens: NDArray[np.int32],
        trainable_tokens: NDArray[np.int32],
        advantage: NDArray[np.float32],
        temperature: NDArray[np.float32],
    ) -> SampleTable:
        rows = len(tokens)

        def column(name: str, dtype: str, below: int | None = None) -> NDArray[Any]:
            values = self.array(f"sample/{name}", dtype, rows=rows)
            if below is not None and rows and (int(values.min()) < 0 or int(values.max()) >= below):
                raise WireError(
                    f"{self.name}: sample/{name} goes up to {int(values.max())}, {below} names are listed"
                )
            return values

        counts = column("version_runs", "i4")
        self._at_least("version runs of a sample", counts, 0)
        flat = self.array("versions", "i4", rows=int(counts.sum(dtype=np.int64)), tail=(2,))
        self._at_least("a version or its count", flat.reshape(-1), 0)
        owner = np.repeat(np.arange(rows), counts)
        stated = np.bincount(owner, weights=flat[:, 1], minlength=rows).astype(np.int64)
        wrong = np.flatnonzero(stated != trainable_tokens)
        if len(wrong):
            i = int(wrong[0])
            raise WireError(
                f"{self.name}: sample {i} has {int(trainable_tokens[i])} trainable tokens, but versions for {int(stated[i])}"
            )
        oldest = np.full(rows, np.iinfo(np.int32).max, np.int32)
        sampled = flat[:, 1] > 0
        np.minimum.at(oldest, owner[sampled], flat[sampled, 0])
        oldest[trainable_tokens == 0] = -1
        pairs = [(version, count) for version, count in flat.tolist()]
        ends = np.cumsum(counts, dtype=np.int64).tolist()
        starts = [0, *ends[:-1]]
        return SampleTable(
            position=column("position", "i4"),
            group=column("group", "i8"),
            member=column("member", "i4"),
            attempt=column("attempt", "i4"),
            task=column("task", "i8"),
            env=column("env", "i4", len(self.header.envs)),
            ending=column("ending", "u1", len(self.header.endings)),
            reward=column("reward", "f8"),
            temperature=temperature,
            advantage=advantage,
            oldest_version=oldest,
            tokens=tokens,
            trainable_tokens=trainable_tokens,
            cut_tokens=column("cut_tokens", "i4"),
            version_runs=tuple(tuple(pairs[a:b]) for a, b in zip(starts, ends, strict=False)),
            envs=self.header.envs,
            endings=self.header.endings,
        )

    def _streams(self, wanted: Sequence[str] | None, tokens: int) -> dict[str, NDArray[Any]]:
        there = [name.removeprefix("stream/") for name in self.arrays if name.startswith("stream/")]
        if wanted is None:
            # A dtype of a later release is a stream that this one does not know: skipped, like an unknown name.
            wanted = [name for name in there if self.arrays[f"stream/{name}"][1] in DTYPES]
        return {name: self.array(f"stream/{name}", None, rows=tokens, tail=None) for name in wanted}


def _leading(samples: NDArray[np.int32], sequences: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool over all sequences: the first `samples[i]` of the `sequences[i]` of each micro-batch."""
    first = np.cumsum(sequences, dtype=np.int64) - sequences
    position = np.arange(int(sequences.sum(dtype=np.int64))) - np.repeat(first, sequences)
    return position < np.repeat(samples, sequences)
