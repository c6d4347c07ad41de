"""Records and rollouts ⇄ the payloads of frames.

Log payload: a list of blocks, each zstd over the msgpack of up to `BLOCK_RECORDS` lines.

Store payload: the ids of up to some hundred rollouts, then one zstd block: msgpack of everything but the arrays; all
token ids; all logprobs. The arrays are laid out byte plane by byte plane (first bytes of all numbers, then second
bytes, …): the high planes of ids are nearly constant, and those of logprobs repeat. Measured on 8k-token rollouts
with Zipf-distributed ids, level 1: 61 µs and 1.75 + 3.5 bytes a number, against 108 µs and 1.8 + 3.7 as they are;
level 3 takes longer and gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from paceline.domain.commands import Command
from paceline.domain.events import Event
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Message, Rollout
from paceline.domain.sample import Sample
from paceline.errors import WireError
from paceline.journal.lines import Line, RolloutLine, line_of, rollout_line, rollout_of, turn_of

BLOCK_RECORDS = 512
"""Encoding a block holds the interpreter for about a millisecond; more would be felt on the event loop."""

LEVEL = 1

_MAX_BLOCK = 1 << 30
"""Bytes that a block may have unpacked. Ours have a few million."""


class StoredRollout(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A rollout without its arrays."""

    line: RolloutLine
    messages: Any = ()
    info: Any = None


class _Store(msgspec.Struct, frozen=True, gc=False, array_like=True):
    rollouts: tuple[RolloutId, ...]
    sizes: tuple[int, int, int]
    """Bytes of the three parts, unpacked."""
    block: bytes


class _PlainArray(msgspec.Struct, frozen=True, gc=False, array_like=True):
    dtype: Literal["<f4", "<i4", "|u1"]
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> NDArray[Any]:
        """Read-only, since the bytes are."""
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


Extra: TypeAlias = tuple[NDArray[Any] | None, dict[str, NDArray[Any]]]
"""Advantages by token, if there is one a token, and streams by name."""


def _array(array: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return plain.dtype.str, plain.shape, plain.tobytes()


def _plain(value: Any) -> Any:
    """What msgpack has no word for, as something near: numpy numbers and arrays, else its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _as_many(logprobs: NDArray[np.float32], tokens: int) -> NDArray[np.float32]:
    """The logprobs, as many as there are tokens. The sink refuses a rollout where they disagree; here it must not
    shift the numbers of the others in its block."""
    if len(logprobs) == tokens:
        return logprobs
    fitted = np.full(tokens, np.nan, np.float32)
    fitted[: len(logprobs)] = logprobs[:tokens]
    return fitted


class _Scratch:
    """Memory that is used again: a fresh megabyte for each block costs more page faults than its compression."""

    def __init__(self) -> None:
        self._block = np.empty(1 << 16, np.uint8)

    def bytes_of(self, length: int) -> NDArray[np.uint8]:
        if length > len(self._block):
            self._block = np.empty(1 << length.bit_length(), np.uint8)
        return self._block[:length]


class Packer:
    """Writes payloads. For one thread."""

    def __init__(self, level: int = LEVEL) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level)
        self._msgpack = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._scratch = _Scratch()
        self._numbers = _Scratch()
        self.packed = 0
        """Rollouts so far."""
        self.packed_bytes = 0
        """What they took before compression."""

    def records(self, records: Sequence[tuple[int, float, Event, Sequence[Command]]]) -> bytes:
        blocks = []
        for start in range(0, len(records), BLOCK_RECORDS):
            lines = [
                (seq, at, line_of(event), [line_of(command) for command in commands])
                for seq, at, event, commands in records[start : start + BLOCK_RECORDS]
            ]
            blocks.append(self._zstd.compress(self._encode(lines)))
        return self._msgpack.encode(blocks)

    def rollouts(self, rollouts: Sequence[Rollout]) -> bytes:
        meta = self._encode([(rollout_line(r), r.messages, r.info) for r in rollouts])
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        ids = [ids for turn in turns for ids in (turn.prompt_ids, turn.sampled_ids)]
        logprobs = [_as_many(turn.logprobs, len(turn.sampled_ids)) for turn in turns]
        sizes = (len(meta), 4 * sum(map(len, ids)), 4 * sum(map(len, logprobs)))
        whole = self._scratch.bytes_of(sum(sizes))
        self.packed += len(rollouts)
        self.packed_bytes += sum(sizes)
        whole[: sizes[0]] = np.frombuffer(meta, np.uint8)
        self._put_planes(ids, np.int32, whole[sizes[0] : sizes[0] + sizes[1]])
        self._put_planes(logprobs, np.float32, whole[sizes[0] + sizes[1] :])
        block = self._zstd.compress(whole.data)
        return self._msgpack.encode(_Store(tuple([r.id for r in rollouts]), sizes, block))

    def extras(self, samples: Sequence[tuple[int, Sample]]) -> bytes:
        """What of these samples (with their number in their rollout) neither the log nor the rollout tells."""
        rows = [
            (
                sample.rollout,
                number,
                _array(sample.advantage) if isinstance(sample.advantage, np.ndarray) else None,
                {name: _array(stream) for name, stream in sample.streams.items()},
            )
            for number, sample in samples
        ]
        return self._zstd.compress(self._msgpack.encode(rows))

    def _put_planes(self, arrays: list[NDArray[Any]], dtype: Any, out: NDArray[np.uint8]) -> None:
        if len(out):
            numbers = self._numbers.bytes_of(len(out)).view(dtype)
            np.concatenate(arrays, out=numbers, casting="same_kind")
            out.reshape(4, -1)[:] = numbers.view(np.uint8).reshape(-1, 4).T

    def _encode(self, values: list[Any]) -> bytes:
        try:
            return self._msgpack.encode(values)
        except (TypeError, ValueError, OverflowError, RecursionError):
            # An environment put something odd into `info`, a message or a metric: half a surrogate pair, an
            # integer of 70 bits. One such record must not keep the others from disk.
            return self._msgpack.encode([_tamed(value, 0) for value in values])


def _tamed(value: Any, depth: int) -> Any:
    """The same tree, with whatever msgpack cannot carry replaced by text that it can."""
    if depth > 64:
        return "…"
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bool) or value is None or isinstance(value, float | bytes):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, dict):
        return {
            _tamed(k if isinstance(k, str | int) else str(k), depth + 1): _tamed(v, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_tamed(v, depth + 1) for v in value]
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = [_tamed(getattr(value, name), depth + 1) for name in value.__struct_fields__]
        if config.array_like:
            return fields
        tagged = {config.tag_field: config.tag} if config.tag_field else {}
        return {**tagged, **dict(zip(value.__struct_encode_fields__, fields, strict=True))}
    return _tamed(_plain(value), depth + 1)


class Unpacker:
    """Reads payloads. WireError names `where` when one is not what it should be."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()
        self._blocks = msgspec.msgpack.Decoder(list[bytes])
        self._lines = msgspec.msgpack.Decoder(list[Line])
        self._store = msgspec.msgpack.Decoder(_Store)
        self._meta = msgspec.msgpack.Decoder(list[StoredRollout])
        self._extras = msgspec.msgpack.Decoder(
            list[tuple[RolloutId, int, _PlainArray | None, dict[str, _PlainArray]]]
        )

    def records(self, payload: bytes, where: str) -> Iterator[Line]:
        try:
            for block in self._blocks.decode(payload):
                yield from self._lines.decode(self._unpacked(block))
        except _UNREADABLE as error:
            raise WireError(f"{where} holds no records that this Paceline can read: {error}") from error

    def rollouts(self, payload: bytes, where: str, wanted: Collection[RolloutId] | None) -> Iterator[Rollout]:
        try:
            store = self._store.decode(payload)
            if wanted is not None and not any(id_ in wanted for id_ in store.rollouts):
                return
            data = self._unpacked(store.block)
            if min(store.sizes) < 0 or sum(store.sizes) != len(data):
                raise ValueError(f"{len(data)} bytes unpacked, {sum(store.sizes)} stated")
            meta, ids, _ = store.sizes
            stored = self._meta.decode(data[:meta])
            token_ids = _joined(data[meta : meta + ids], np.int32)
            logprobs = _joined(data[meta + ids :], np.float32)
            lines = [turn for one in stored for turn in one.line.turns]
            sampled = sum(turn.sampled_tokens for turn in lines)
            if min((min(t.prompt_tokens, t.sampled_tokens) for t in lines), default=0) < 0 or (
                len(token_ids),
                len(logprobs),
            ) != (sampled + sum(turn.prompt_tokens for turn in lines), sampled):
                raise ValueError(
                    f"{len(token_ids)} ids and {len(logprobs)} logprobs for {sampled} sampled tokens"
                )
        except _UNREADABLE as error:
            raise WireError(f"{where} holds no rollouts that this Paceline can read: {error}") from error
        id_at = logprob_at = 0
        for one in stored:
            turns = []
            for turn in one.line.turns:
                sampled_at = id_at + turn.prompt_tokens
                end = sampled_at + turn.sampled_tokens
                turns.append(
                    turn_of(
                        turn,
                        token_ids[id_at:sampled_at],
                        token_ids[sampled_at:end],
                        logprobs[logprob_at : logprob_at + turn.sampled_tokens],
                    )
                )
                id_at, logprob_at = end, logprob_at + turn.sampled_tokens
            if wanted is None or one.line.id in wanted:
                messages = tuple([_message(m) for m in one.messages])
                yield rollout_of(one.line, turns, messages=messages, info=one.info or {})

    def extras(self, payload: bytes, where: str) -> Iterator[tuple[RolloutId, int, Extra]]:
        try:
            for rollout, number, advantage, streams in self._extras.decode(self._unpacked(payload)):
                per_token = None if advantage is None else advantage.array()
                yield rollout, number, (per_token, {name: s.array() for name, s in streams.items()})
        except _UNREADABLE as error:
            raise WireError(f"{where} holds no advantages that this Paceline can read: {error}") from error

    def _unpacked(self, block: bytes) -> bytes:
        size = zstandard.frame_content_size(block)
        if not 0 <= size <= _MAX_BLOCK:
            raise ValueError(f"a block states {size} bytes unpacked, at most {_MAX_BLOCK} are read")
        return self._zstd.decompress(block)


_UNREADABLE = (msgspec.MsgspecError, zstandard.ZstdError, ValueError, RecursionError, MemoryError)


def _message(said: Any) -> Message:
    if isinstance(said, dict) and {"role", "content"} <= said.keys():
        return Message(str(said["role"]), str(said["content"]))
    return Message("", str(said))


def _joined(planes: bytes, dtype: Any) -> NDArray[Any]:
    numbers: NDArray[Any] = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(4, -1).T)
    numbers = numbers.reshape(-1).view(dtype)
    numbers.flags.writeable = False
    return numbers
