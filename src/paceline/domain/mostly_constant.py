"""Numbers that are one for a whole sequence nearly always, such as advantages and temperatures: kept as that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PER_SEQUENCE, WHERE_TRAINABLE, PER_TOKEN = 0, 1, 2
"""One value for all tokens of a sequence; one for its trainable tokens, 0 elsewhere; or a value for each token."""


class MostlyConstant(NamedTuple):
    """A number for each token of S sequences that follow each other, exact to the bit, NaN included."""

    values: NDArray[np.float32]
    """float32[S]; of no meaning where the kind is PER_TOKEN."""
    kinds: NDArray[np.uint8]
    """uint8[S]."""
    tokens: NDArray[np.float32]
    """Of the sequences of kind PER_TOKEN, one sequence after the other."""

    @classmethod
    def of(
        cls, numbers: NDArray[np.float32], lengths: NDArray[np.int32], trainable: NDArray[np.bool_]
    ) -> MostlyConstant:
        """The shortest form of `numbers`, float32[N] with N the sum of `lengths`, int32[S], all at least 1."""
        if not len(lengths):
            return cls(np.zeros(0, np.float32), np.zeros(0, np.uint8), np.zeros(0, np.float32))
        bits = numbers.view(np.int32)  # compared as bits: NaN equals itself and -0.0 is not 0.0
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        low, high = np.minimum.reduceat(bits, starts), np.maximum.reduceat(bits, starts)
        kinds = np.where(low == high, PER_SEQUENCE, PER_TOKEN).astype(np.uint8)
        if not kinds.any():
            return cls(low.view(np.float32), kinds, numbers[:0])
        ends = np.iinfo(np.int32)
        low_t = np.minimum.reduceat(np.where(trainable, bits, ends.max), starts)
        high_t = np.maximum.reduceat(np.where(trainable, bits, ends.min), starts)
        # Masking by multiplication leaves -0.0 where a negative number was: 0 all the same.
        elsewhere = np.logical_or.reduceat((numbers != 0) & ~trainable, starts)
        masked = (kinds == PER_TOKEN) & (low_t == high_t) & ~elsewhere
        kinds[masked] = WHERE_TRAINABLE
        values = np.where(kinds == PER_SEQUENCE, low, np.where(masked, low_t, 0)).astype(np.int32)
        return cls(values.view(np.float32), kinds, numbers[np.repeat(kinds == PER_TOKEN, lengths)])

    def expanded(self, lengths: NDArray[np.int32], trainable: NDArray[np.bool_]) -> NDArray[np.float32]:
        """float32[N]: the number of each token."""
        out = np.repeat(self.values, lengths)
        if self.kinds.any():
            kinds = np.repeat(self.kinds, lengths)
            out[(kinds == WHERE_TRAINABLE) & ~trainable] = 0.0
            out[kinds == PER_TOKEN] = self.tokens
        return out

    def scalars(self) -> NDArray[np.float32]:
        """float32[S]; NaN where one number does not say all."""
        return np.where(self.kinds == PER_TOKEN, np.float32(np.nan), self.values)

    def split(self, sequences: Iterable[int], lengths: NDArray[np.int32]) -> Iterator[MostlyConstant]:
        """Parts of so many sequences each, as views; `lengths` are those of all."""
        at = token = 0
        for count in sequences:
            mine = slice(at, at + count)
            part = MostlyConstant(self.values[mine], self.kinds[mine], self.tokens[token:])
            end = token + part.token_count(lengths[mine])
            yield part._replace(tokens=self.tokens[token:end])
            at, token = mine.stop, end

    def token_count(self, lengths: NDArray[np.int32]) -> int:
        """How many `tokens` there must be."""
        return int(lengths[self.kinds == PER_TOKEN].sum(dtype=np.int64))
