"""A batch becomes micro-batches for N data-parallel ranks: bins that are full, ranks that take equally long.

1. Sequences go into bins of at most `micro_batch_tokens`, longest first, each into the fullest bin that takes it
   (best-fit decreasing, within 11/9 of the fewest bins: Johnson, 1973).
2. The number of bins is made a multiple of the ranks: the dearest bin with more than one sequence is split in two,
   and where none is left, micro-batches of padding are added. No rollout is split off or dropped for it.
3. Bins go to ranks, the same number each, so that the dearest rank is as cheap as can be: longest processing time
   first (Graham, 1969), then swaps between the dearest rank and whichever other gains most, as long as one does.

What is one number for a whole sample, its temperature and nearly always its advantage, stays that: a trainer makes one a
token of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.batch import Batch, MicroBatch, PackedBatch
from paceline.domain.mostly_constant import PER_SEQUENCE, WHERE_TRAINABLE, MostlyConstant
from paceline.domain.sample import Sample, Stream
from paceline.errors import InvariantError

Bin: TypeAlias = list[int]
"""Positions of samples in their batch."""

_SWAPS_PER_RANK = 8
"""Bounds the refinement; each swap lowers the dearest rank, and a few a rank bring it within a percent."""

_SWAP_PAIRS, _ALL_PAIRS = 1 << 20, 1 << 27
"""Pairs of bins that one swap may be chosen from, and all swaps together (about 0.5 s). Where there are more, a rank has
so many bins that the last ones of longest-first even it out, and comparing them all would take minutes."""

_STREAM_FILL = {"loss_weights": 1}
"""What a sample without a named stream is given; 0 for all others but `ref_logprobs`, which takes `logprobs`."""


class Cost(msgspec.Struct, frozen=True):
    """Time of a micro-batch, up to a factor: linear * sum(n) + quadratic * sum(n^2) over its sequences' tokens n.

    A decoder layer of width d costs 24 d^2 floating-point operations a token outside attention and 4 d n / 2 in it
    (arXiv:2104.04473, causal), so quadratic / linear is 1 / (12 d); the default is that of d = 2048.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / (12 * 2048)


DEFAULT_COST = Cost()


class PackSettings(Protocol):
    """What packing needs to know (`BatchSection` has it)."""

    @property
    def seq_len(self) -> int: ...
    @property
    def micro_batch_tokens(self) -> int | None: ...
    @property
    def data_parallel(self) -> int: ...
    @property
    def pad_to_multiple_of(self) -> int: ...


def pack_as(settings: PackSettings, batch: Batch) -> PackedBatch:
    """`pack`, as a run's settings have it."""
    return pack(
        batch,
        ranks=settings.data_parallel,
        micro_batch_tokens=settings.micro_batch_tokens or settings.seq_len,
        pad_to_multiple_of=settings.pad_to_multiple_of,
    )


def pack(
    batch: Batch,
    *,
    ranks: int,
    micro_batch_tokens: int,
    pad_to_multiple_of: int = 1,
    cost: Cost = DEFAULT_COST,
) -> PackedBatch:
    """Micro-batches of `batch` for `ranks` ranks, the dearest of each rank first.

    Before padding to `pad_to_multiple_of`, none has more than `micro_batch_tokens` tokens. A stream that some sample
    has is given to all, so that every micro-batch has the same ones: filled with 1 for `loss_weights`, with the
    sampling logprobs for `ref_logprobs` (the reference is then the sampling policy), else with 0.
    """
    lengths = np.array([len(sample.token_ids) for sample in batch.samples], np.int64)
    if len(lengths) and int(lengths.max()) > micro_batch_tokens:
        longest = int(lengths.argmax())
        raise InvariantError(
            f"step {batch.step}: a sample of {batch.samples[longest].rollout} has {lengths[longest]} tokens, more "
            f"than micro_batch_tokens {micro_batch_tokens}"
        )
    sample_costs = cost.linear * lengths + cost.quadratic * lengths.astype(np.float64) ** 2
    bins = _fill(lengths.tolist(), micro_batch_tokens)
    bins = _to_multiple(bins, sample_costs.tolist(), ranks)
    costs = np.array([sum(sample_costs[bin_].tolist()) for bin_ in bins])
    shares = assign(costs, ranks)
    order = [bins[i] for share in shares for i in share]
    micro_batches = _flatten(batch.samples, order, pad_to_multiple_of)
    each = len(shares[0])
    return PackedBatch(
        batch, tuple([tuple(micro_batches[i : i + each]) for i in range(0, len(micro_batches), each)])
    )


def balance(packed: PackedBatch, cost: Cost = DEFAULT_COST) -> float:
    """The dearest rank's cost over the mean: 1 is perfect, 1.1 has all wait a tenth of the time for one."""
    costs = np.zeros(len(packed.ranks))
    for rank, micro_batches in enumerate(packed.ranks):
        for micro_batch in micro_batches:
            n = micro_batch.lengths.astype(np.float64)
            costs[rank] += cost.linear * n.sum() + cost.quadratic * (n**2).sum()
    return float(costs.max() / costs.mean())


def assign(costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank, equally many each, the dearest first. `len(costs)` is a multiple of `ranks`."""
    each = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for i in np.argsort(-costs, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        shares[rank].append(i)
        if len(shares[rank]) < each:
            heapq.heappush(heap, (total + float(costs[i]), rank))
    if ranks > 1 and each > 1:
        shares = _refine(np.array(shares), costs).tolist()
    return [sorted(share, key=lambda i: (-costs[i], i)) for share in shares]


def _refine(shares: NDArray[np.int64], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Swap bins between the dearest rank and another while that lowers the dearer of the two."""
    ranks, pairs = len(shares), shares.shape[1] * shares.size
    swaps = 0 if pairs > _SWAP_PAIRS else min(_SWAPS_PER_RANK * ranks, _ALL_PAIRS // pairs)
    totals = costs[shares].sum(axis=1)
    for _ in range(swaps):
        worst = int(totals.argmax())
        mine = costs[shares[worst]]
        # moved[m, r, o]: what the dearest rank sheds when its bin m goes to rank r against that rank's bin o.
        moved = mine[:, None, None] - costs[shares][None]
        dearer = np.maximum(totals[worst] - moved, totals[None, :, None] + moved)
        dearer[:, worst] = np.inf
        best = int(dearer.argmin())
        if dearer.flat[best] >= totals[worst] * (1 - 1e-9):
            break
        m, r, o = np.unravel_index(best, dearer.shape)
        shed = moved[m, r, o]
        shares[worst, m], shares[r, o] = shares[r, o], shares[worst, m]
        totals[worst] -= shed
        totals[r] += shed
    return shares


def _fill(lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Best-fit decreasing. `rooms` holds (room left, bin), sorted, so the fullest bin that fits is a bisection away."""
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[i], 0))
        if at < len(rooms):
            room, number = rooms.pop(at)
            bins[number].append(i)
        else:
            room, number = capacity, len(bins)
            bins.append([i])
        insort(rooms, (room - lengths[i], number))
    return bins


def _to_multiple(bins: list[Bin], costs: Sequence[float], ranks: int) -> list[Bin]:
    """As many bins as a multiple of `ranks`, by splitting; what cannot be split is filled up with empty bins."""
    missing = -len(bins) % ranks if bins else ranks
    bins = list(bins)
    heap = [(-sum([costs[i] for i in bin_]), number) for number, bin_ in enumerate(bins) if len(bin_) > 1]
    heapq.heapify(heap)
    while missing and heap:
        _, number = heapq.heappop(heap)
        halves: tuple[Bin, Bin] = ([], [])
        sums = [0.0, 0.0]
        for i in sorted(bins[number], key=lambda i: -costs[i]):
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(i)
            sums[lighter] += costs[i]
        bins[number] = halves[0]
        bins.append(halves[1])
        for where, half, total in ((number, halves[0], sums[0]), (len(bins) - 1, halves[1], sums[1])):
            if len(half) > 1:
                heapq.heappush(heap, (-total, where))
        missing -= 1
    return bins + [[] for _ in range(missing)]


class _Layout(msgspec.Struct, frozen=True):
    """The whole batch as one line of sequences, padding included: every array is made once and then sliced."""

    samples: Sequence[Sample]
    order: list[int]
    """Position of each sequence's sample; -1 is padding."""
    lengths: NDArray[np.int32]

    def join(self, parts: list[NDArray[Any]], padding: NDArray[Any]) -> NDArray[Any]:
        """`parts`, one a sample, in order, with a slice of `padding` where a sequence is padding."""
        return np.concatenate(
            [
                parts[i] if i >= 0 else padding[:n]
                for i, n in zip(self.order, self.lengths.tolist(), strict=True)
            ]
        )

    def column(self, values: list[float], padding: float) -> NDArray[np.float32]:
        """One number a sequence."""
        return np.array([*values, padding], np.float32)[np.array(self.order, np.int64)]


def _flatten(samples: Sequence[Sample], bins: Sequence[Bin], multiple: int) -> list[MicroBatch]:
    order: list[int] = []
    lengths: list[int] = []
    sequences: list[int] = []
    real: list[int] = []
    for bin_ in bins:
        sizes = [len(samples[i].token_ids) for i in bin_]
        padding = -sum(sizes) % multiple if sizes else multiple
        order += bin_
        lengths += sizes
        if padding:
            order.append(-1)
            lengths.append(padding)
        real.append(len(bin_))
        sequences.append(len(bin_) + (padding > 0))
    layout = _Layout(samples, order, np.array(lengths, np.int32))
    arrays = _arrays(layout, multiple)
    advantages = _advantages(layout, arrays["trainable"], multiple)
    temperatures = MostlyConstant(
        layout.column([s.temperature for s in samples], 1.0),
        np.full(len(order), PER_SEQUENCE, np.uint8),
        np.zeros(0, np.float32),
    )
    streams = {name: _stream(layout, name, multiple) for name in _stream_names(samples)}
    made: list[MicroBatch] = []
    token, sequence = 0, 0
    index = np.array(order, np.int32)
    parts = zip(
        sequences,
        real,
        advantages.split(sequences, layout.lengths),
        temperatures.split(sequences, layout.lengths),
        strict=True,
    )
    for count, own, advantage, temperature in parts:
        span = layout.lengths[sequence : sequence + count]
        end = token + int(span.sum())
        made.append(
            MicroBatch(
                **{name: array[token:end] for name, array in arrays.items()},
                advantage=advantage,
                temperature=temperature,
                lengths=span,
                sample_index=index[sequence : sequence + own],
                streams={name: stream[token:end] for name, stream in streams.items()},
            )
        )
        token, sequence = end, sequence + count
    return made


def _arrays(layout: _Layout, multiple: int) -> dict[str, NDArray[Any]]:
    """The arrays of all tokens that every `MicroBatch` has, of the whole batch."""
    samples = layout.samples
    return {
        "token_ids": layout.join([s.token_ids for s in samples], np.zeros(multiple, np.int32)),
        "trainable": layout.join([s.trainable for s in samples], np.zeros(multiple, np.bool_)),
        "logprobs": layout.join([s.logprobs for s in samples], np.zeros(multiple, np.float32)),
    }


def _advantages(layout: _Layout, trainable: NDArray[np.bool_], multiple: int) -> MostlyConstant:
    """One number a sample where all have one, else the shortest form of what each token has."""
    samples = layout.samples
    if any(isinstance(s.advantage, np.ndarray) for s in samples):
        per_token: list[NDArray[Any]] = [
            s.advantage if isinstance(s.advantage, np.ndarray) else np.full(s.tokens, s.advantage, np.float32)
            for s in samples
        ]
        numbers = layout.join(per_token, np.zeros(multiple, np.float32))
        numbers *= trainable
        return MostlyConstant.of(numbers, layout.lengths, trainable)
    values = layout.column([float(s.advantage) for s in samples], 0.0)
    # 0 is 0 on every token; said like this, the form is the one that the numbers of the tokens would come to.
    kinds = np.where(values == 0, PER_SEQUENCE, WHERE_TRAINABLE).astype(np.uint8)
    return MostlyConstant(values, kinds, np.zeros(0, np.float32))


def _stream_names(samples: Sequence[Sample]) -> list[str]:
    return sorted({name for sample in samples if sample.streams for name in sample.streams})


def _stream(layout: _Layout, name: str, multiple: int) -> Stream:
    given = [sample.streams[name] for sample in layout.samples if name in sample.streams]
    kinds = {(stream.dtype, stream.shape[1:]) for stream in given}
    if len(kinds) > 1:
        raise InvariantError(f"stream {name!r} comes in {len(kinds)} dtypes or shapes in one batch: {kinds}")
    dtype, shape = kinds.pop()
    fill = _STREAM_FILL.get(name, 0)

    def missing(sample: Sample) -> NDArray[Any]:
        if name == "ref_logprobs":
            return sample.logprobs
        return np.full((sample.tokens, *shape), fill, dtype)

    parts = [s.streams[name] if name in s.streams else missing(s) for s in layout.samples]
    return layout.join(parts, np.full((multiple, *shape), fill, dtype))
