"""A step in which nothing of a token depends on who shares it: not its logits, not its keys and values, to the last bit.

A matrix product sums in an order that its library chooses by the shapes, and a vectorized loop ends in single numbers, which
are rounded otherwise. So every shape that a token meets is fixed, or given by the token's own position:

    layers         its row is one of `TILE` of a product of always the same shape; what is missing is padding
    attention      each token is a query of its own, over a context padded to a power of two of its own length
    everything     rows are a multiple of `TILE`, so that loops over them have no end that is computed otherwise
    else

A prompt's token so comes out the same in a chunk, alone, or computed again, and the same as if it had been sampled: a sequence
goes on from its tokens, after a preemption or elsewhere, as if nothing had been. The idea is that of batch-invariant kernels
(Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025). It holds for one build of torch on one kind of processor.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engines.embedded.model import AttentionGroup, Batch
from paceline.engines.embedded.scheduler import Request

TILE: Final = 32
"""Rows of a product. Two vectors of the widest registers (16 numbers): loops take that many at once."""

_KEYS_AT_ONCE: Final = 1 << 14
"""Most keys of one attention call: more would not fit the caches, and a prompt has one query a token."""


def invariant_batch(
    planned: list[tuple[Request, int]],
    table: NDArray[np.int64],
    size: int,
    block_planes: NDArray[np.int64],
    slot_planes: NDArray[np.int64],
) -> Batch:
    """What the planned requests compute. `table` has their blocks of `size` tokens. `last` is padded, too, by its first."""
    counts = np.array([count for _request, count in planned])
    missing = _missing(int(counts.sum()))
    # Padding is of a sequence with no block but block 0, which is nobody's.
    ids = np.array([*[i for r, n in planned for i in r.ids[r.computed : r.computed + n]], *[0] * missing])
    position = np.array([*[p for r, n in planned for p in range(r.computed, r.computed + n)], *[0] * missing])
    rows = np.concatenate([np.repeat([r.row for r, _n in planned], counts), np.full(missing, -1)])
    table = np.concatenate([table, np.zeros((1, table.shape[1]), table.dtype)])
    widths = 2 ** np.ceil(np.log2(position // size + 1)).astype(np.int64)
    order = np.argsort(widths, kind="stable")
    last = np.argsort(order)[np.cumsum(counts) - 1][[r.computed + n == len(r.ids) for r, n in planned]]
    ids, position, rows, widths = ids[order], position[order], rows[order], widths[order]
    groups = [
        _group(position[part], table[rows[part], :width], int(width), size, block_planes)
        for width in np.unique(widths)
        for part in _parts(np.flatnonzero(widths == width), max(1, _KEYS_AT_ONCE // int(width * size)))
    ]
    slots = table[rows, position // size] * size + position % size
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(position),
        slots=torch.from_numpy(slots[:, None] + slot_planes),
        groups=groups,
        last=torch.from_numpy(np.concatenate([last, np.repeat(last[:1], _missing(len(last)))])),
    )


def _missing(count: int) -> int:
    """Rows up to the next multiple of `TILE`."""
    return -count % TILE


def _parts(tokens: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    return [tokens[first : first + most] for first in range(0, len(tokens), most)]


def _group(
    position: NDArray[np.int64],
    blocks: NDArray[np.int64],
    width: int,
    size: int,
    block_planes: NDArray[np.int64],
) -> AttentionGroup:
    """Tokens whose contexts are padded to `width` blocks; the table, and so `blocks`, may be narrower."""
    blocks = np.pad(blocks, ((0, 0), (0, width - blocks.shape[1])))
    hidden = np.arange(width * size) > position[:, None, None]
    mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0)))
    gather = torch.from_numpy((block_planes + blocks).reshape(-1))
    return AttentionGroup(len(position), 1, gather, mask, None, None)
