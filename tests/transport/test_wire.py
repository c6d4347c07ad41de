"""The wire format: exact round trips, compactness, old readers, and bytes that lie."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.packing import pack
from paceline.domain.batch import Batch, PackedBatch
from paceline.domain.mostly_constant import MostlyConstant
from paceline.errors import InvariantError, WireError
from paceline.transport.wire import FORMAT, MAGIC, PREFIX_BYTES, RankBatch, decode, encode, read_prefix
from transport.batches import joined, packed

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=4), min_size=1, max_size=4)


def wire(batch: PackedBatch, rank: int = 0) -> bytes:
    return joined(encode(batch, rank, run_id="run-1").chunks)


def assert_same(batch: PackedBatch, rank: int, read: RankBatch) -> None:
    assert (read.step, read.trains, read.rank, read.ranks) == (
        batch.batch.step,
        batch.batch.trains,
        rank,
        len(batch.ranks),
    )
    assert len(read.micro_batches) == len(batch.ranks[rank])
    for sent, got in zip(batch.ranks[rank], read.micro_batches, strict=True):
        for name in ("token_ids", "trainable", "logprobs", "advantages", "temperatures", "lengths"):
            one, other = getattr(sent, name), getattr(got, name)
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes(), name
        assert set(sent.streams) == set(got.streams)
        for name, values in sent.streams.items():
            np.testing.assert_array_equal(values, got.streams[name])
        assert len(got.samples) == len(sent.sample_index)
        for row, position, runs in zip(got.samples, sent.sample_index, got.samples.version_runs, strict=True):
            sample = batch.batch.samples[position]
            assert row.position == position
            assert row.rollout == sample.rollout
            assert (row.task, row.env, row.ending) == (sample.task_index, sample.env, sample.ending)
            assert row.reward == sample.reward
            assert runs == sample.versions
            assert (row.tokens, row.trainable_tokens) == (sample.tokens, sample.trainable_tokens)
            assert row.cut_tokens == sample.cut_tokens
            if sample.trainable_tokens:
                assert row.oldest_version == sample.oldest_version
            else:
                assert row.oldest_version is None


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.integers(1, 3).flatmap(lambda n: st.lists(LENGTHS, min_size=n, max_size=n)),
    per_token=st.booleans(),
    masked=st.booleans(),
    streams=st.sampled_from([(), ("loss_weights",), ("loss_weights", "ref_logprobs")]),
    pad_to=st.sampled_from([1, 16]),
)
@settings(max_examples=150, deadline=None)
def test_every_rank_reads_back_to_the_bit_what_was_packed(
    seed: int,
    lengths: list[list[list[int]]],
    per_token: bool,
    masked: bool,
    streams: tuple[str, ...],
    pad_to: int,
) -> None:
    batch = packed(seed, lengths, per_token=per_token, masked=masked, streams=streams, pad_to=pad_to)
    for rank in range(len(lengths)):
        assert_same(batch, rank, decode(wire(batch, rank)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -0.0, 1e-45])
def test_odd_numbers_survive_as_advantage_of_a_whole_sequence(number: float) -> None:
    batch = packed(1, [[[7, 9]]])
    micro_batch = batch.ranks[0][0]
    numbers = np.full(16, number, np.float32)
    advantage = MostlyConstant.of(numbers, micro_batch.lengths, micro_batch.trainable)
    odd = msgspec.structs.replace(micro_batch, advantage=advantage)
    read = decode(wire(PackedBatch(batch.batch, ((odd,),))))
    assert read.micro_batches[0].advantages.tobytes() == numbers.tobytes()


def test_advantages_that_do_not_fit_their_sequences_are_refused() -> None:
    batch = packed(1, [[[7, 9]]])
    micro_batch = batch.ranks[0][0]
    good = micro_batch.advantage
    for wrong, told in (
        (good._replace(values=good.values[1:]), r"advantage has 1 values and 2 kinds for 2 sequences"),
        (good._replace(kinds=np.full(2, 2, np.uint8)), r"0 numbers for the 16 tokens"),
        (good._replace(tokens=np.zeros(3, np.float32)), r"3 numbers for the 0 tokens"),
    ):
        odd = msgspec.structs.replace(micro_batch, advantage=wrong)
        with pytest.raises(InvariantError, match=told):
            wire(PackedBatch(batch.batch, ((odd,),)))


def test_what_real_packing_makes_is_sent_as_one_number_a_sequence_and_read_back() -> None:
    samples = packed(3, [[[700, 900, 40], [300]]]).batch.samples
    signed = tuple(
        msgspec.structs.replace(s, advantage=a) for s, a in zip(samples, (-0.5, 0.25, -2.0, 0.0), strict=True)
    )
    batch = Batch(step=5, samples=signed, rollouts=tuple(s.rollout for s in signed))
    made = pack(batch, ranks=2, micro_batch_tokens=1024, pad_to_multiple_of=64)
    for rank in (0, 1):
        read = decode(wire(made, rank))
        for sent, got in zip(made.ranks[rank], read.micro_batches, strict=True):
            np.testing.assert_array_equal(sent.advantages, got.advantages)
            np.testing.assert_array_equal(sent.temperatures, got.temperatures)
            assert [row.advantage for row in got.samples] == [
                signed[position].advantage for position in sent.sample_index
            ]


def test_a_number_that_differs_only_outside_what_trains_is_still_sent_once() -> None:
    plain, masked = (wire(packed(3, [[[4000]]], masked=masked)) for masked in (False, True))
    assert abs(len(plain) - len(masked)) < 64


def test_a_long_batch_needs_less_than_nine_bytes_a_token_and_a_short_one_less_than_ten() -> None:
    long = packed(0, [[[4000] * 8] * 4])
    short = packed(0, [[[768] * 16] * 2])
    assert len(wire(long)) / long.batch.tokens < 8.3
    assert len(wire(short)) / short.batch.tokens < 9


def test_position_ids_boundaries_and_versions_follow_from_the_lengths() -> None:
    batch = packed(2, [[[3, 5]]], pad_to=10)
    read = decode(wire(batch)).micro_batches[0]
    assert read.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert read.boundaries.tolist() == [0, 3, 8, 10]
    assert read.sequence_ids.tolist() == [0] * 3 + [1] * 5 + [2] * 2
    assert (read.versions >= 0).tolist() == read.trainable.tolist()
    stated = [v for s in batch.batch.samples for v, n in s.versions for _ in range(n)]
    assert read.versions[read.trainable].tolist() == stated


def test_arrays_are_views_of_the_buffer_and_writable_only_if_it_is() -> None:
    data = wire(packed(0, [[[50]]]))
    read = decode(data)
    assert not read.micro_batches[0].token_ids.flags.writeable
    assert np.shares_memory(read.micro_batches[0].logprobs, np.frombuffer(data, np.uint8))
    assert decode(bytearray(data)).micro_batches[0].token_ids.flags.writeable


def test_equal_batches_have_equal_digests_and_one_changed_reward_another() -> None:
    first, again = (encode(packed(4, [[[20, 30]]]), 0, run_id="r").digest for _ in range(2))
    other = packed(4, [[[20, 30]]])
    changed = msgspec.structs.replace(other.batch.samples[0], reward=9.0)
    batch = msgspec.structs.replace(other.batch, samples=(changed, *other.batch.samples[1:]))
    assert first == again
    assert encode(PackedBatch(batch, other.ranks), 0, run_id="r").digest != first


# --- growth: readers and writers of different age ------------------------------------------------------------


def remade(data: bytes, change: Any, *, more: bytes = b"") -> bytes:
    """The file with its header changed by `change`, its digest right again."""
    prefix = read_prefix(data)
    header = json.loads(data[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes])
    body = data[PREFIX_BYTES + prefix.header_bytes :]
    body += bytes(-len(body) % 64)
    changed = change(header, len(body))
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    return framed(text, body + more)


def framed(header: bytes, body: bytes, *, format_: int = FORMAT, magic: bytes = MAGIC) -> bytes:
    header += b" " * (-len(header) % 64)
    start = struct.pack("<8sHHIQ8x", magic, format_, 0, len(header), 64 + len(header) + len(body))
    digest = hashlib.blake2b(start + header + body, digest_size=32).digest()
    return start + digest + header + body


def test_a_reader_skips_header_fields_arrays_and_streams_of_a_later_release() -> None:
    def add(header: dict[str, Any], end: int) -> None:
        header["modality"] = {"images": [1, 2, 3]}
        header["arrays"].append(["sample/difficulty", "f4", [1], end])
        header["arrays"].append(["stream/experts", "bf16", [50], end])

    batch = packed(0, [[[50]]], streams=("loss_weights",))
    later = remade(wire(batch), add, more=bytes(256))
    assert_same(batch, 0, decode(later))
    assert set(decode(later, streams=[]).micro_batches[0].streams) == set()
    with pytest.raises(WireError, match="no array 'stream/ref_logprobs'"):
        decode(later, streams=["ref_logprobs"])


def test_a_format_of_the_future_is_refused_with_both_numbers() -> None:
    with pytest.raises(WireError, match=rf"step.plb has wire format 9, this Paceline reads {FORMAT}"):
        decode(framed(b"{}", b"", format_=9), name="step.plb")


# --- bytes that lie ------------------------------------------------------------------------------------------


def test_s91_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> Any:
            return (Path.touch, (touched,))

    for data in (pickle.dumps(Touch()), framed(pickle.dumps(Touch()), b"")):
        with pytest.raises(WireError):
            decode(data)
    assert not touched.exists()


def test_s91_a_length_of_a_gigabyte_is_compared_before_anything_is_reserved() -> None:
    start = struct.pack("<8sHHIQ8x32x", MAGIC, FORMAT, 0, 64, 1 << 30)
    with pytest.raises(WireError, match="128 bytes, its prefix states 1073741824"):
        decode(start + bytes(64))
    start = struct.pack("<8sHHIQ8x32x", MAGIC, FORMAT, 0, 1 << 30, 2 << 30)
    with pytest.raises(WireError, match="header of 1073741824 bytes"):
        decode(start + bytes(64))


def test_s91_nesting_of_ten_thousand_levels_is_refused() -> None:
    deep = b'{"extra":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    with pytest.raises(WireError, match="header that cannot be read"):
        decode(framed(deep, b""))


def test_s91_every_truncation_is_refused_by_name() -> None:
    data = wire(packed(0, [[[5, 6]]]))
    for length in range(len(data)):
        with pytest.raises(WireError, match="rank_0"):
            decode(data[:length], name="rank_0")


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_s91_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)
    with pytest.raises(WireError):
        decode(framed(data, data))


@given(position=st.integers(0, 2_000), flip=st.integers(1, 255))
@settings(max_examples=300)
def test_s91_a_flipped_byte_anywhere_is_noticed(position: int, flip: int) -> None:
    data = bytearray(wire(packed(0, [[[5, 6]]])))
    position %= len(data)
    data[position] ^= flip
    with pytest.raises(WireError):
        decode(data)


HOSTILE = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30])


@given(which=st.integers(0, 60), field=st.integers(1, 3), value=HOSTILE, axis=st.integers(0, 1))
@settings(max_examples=400)
def test_s91_a_header_that_lies_about_an_array_is_refused_or_harmless(
    which: int, field: int, value: int, axis: int
) -> None:
    batch = packed(0, [[[5, 6], [4]]], per_token=True, streams=("loss_weights",), pad_to=8)

    def lie(header: dict[str, Any], _: int) -> None:
        entry = header["arrays"][which % len(header["arrays"])]
        if field == 1:
            entry[1] = ["i1", "u8", "f8", "O", "object"][value % 5]
        elif field == 2:
            entry[2] = [value] if axis else [*entry[2], value]
        else:
            entry[3] = value

    try:
        read = decode(remade(wire(batch), lie))
    except WireError:
        return
    for micro_batch in read.micro_batches:
        assert len(micro_batch.advantages) == len(micro_batch.token_ids) == len(micro_batch.position_ids)
        assert len(micro_batch.versions) == len(micro_batch.temperatures)
        list(micro_batch.samples)


@given(offset=st.integers(0, 10_000), number=st.integers(0, 2**32 - 1))
@settings(max_examples=400)
def test_s91_numbers_that_lie_in_the_arrays_are_refused_or_harmless(offset: int, number: int) -> None:
    data = bytearray(wire(packed(0, [[[5, 6], [4]]], per_token=True, pad_to=8)))
    start = PREFIX_BYTES + read_prefix(data).header_bytes
    at = start + (offset % (len(data) - start)) // 4 * 4
    data[at : at + 4] = struct.pack("<I", number)
    lying = framed(bytes(data[PREFIX_BYTES:start]), bytes(data[start:]))
    try:
        read = decode(lying)
    except WireError:
        return
    for micro_batch in read.micro_batches:
        assert len(micro_batch.advantages) == len(micro_batch.token_ids) == len(micro_batch.position_ids)
        assert len(micro_batch.versions) == len(micro_batch.temperatures)
        list(micro_batch.samples)


# --- what must not be sent -----------------------------------------------------------------------------------


def test_a_batch_whose_arrays_disagree_is_our_own_mistake() -> None:
    batch = packed(0, [[[5, 6]]])
    micro_batch = batch.ranks[0][0]
    short = msgspec.structs.replace(micro_batch, logprobs=micro_batch.logprobs[:-1])
    with pytest.raises(InvariantError, match="logprobs has 10 tokens, its lengths add up to 11"):
        encode(PackedBatch(batch.batch, ((short,),)), 0, run_id="r")


def test_trainable_tokens_without_a_version_are_our_own_mistake() -> None:
    batch = packed(0, [[[5, 6]]])
    micro_batch = batch.ranks[0][0]
    more = msgspec.structs.replace(micro_batch, trainable=np.ones(11, np.bool_))
    with pytest.raises(InvariantError, match="versions for"):
        encode(PackedBatch(batch.batch, ((more,),)), 0, run_id="r")
