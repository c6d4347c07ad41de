"""The wire format: what one data-parallel rank trains on in one step, as one self-describing file.

`docs/wire.md` has the layout for readers in other languages. In short: a prefix of 64 bytes (magic, format, sizes,
BLAKE2b digest of the rest), a JSON header that lists named arrays (name, dtype, shape, offset), then the arrays,
little-endian, each at a multiple of 64 bytes. A reader takes the arrays that it knows and ignores others, so
columns and streams can be added without a new format number.

Sizes: 4 bytes a token for ids, 4 for logprobs, 1/8 for the trainable mask. Advantages and temperatures are one
number a sequence unless they differ within one, policy versions are run-length, the sample table is columns.

Whatever is wrong with a file becomes a `WireError` that names it and the two facts that disagree. Nothing read is
ever executed, and no size found in a file is believed before it was compared with the bytes that are there.
"""

from __future__ import annotations

from paceline.transport.decode import decode
from paceline.transport.encode import Encoded, encode
from paceline.transport.frame import FORMAT, MAGIC, PREFIX_BYTES, Prefix, read_prefix
from paceline.transport.rank_batch import RankBatch, SampleRow, SampleTable, WireMicroBatch

__all__ = [
    "FORMAT",
    "MAGIC",
    "PREFIX_BYTES",
    "Encoded",
    "Prefix",
    "RankBatch",
    "SampleRow",
    "SampleTable",
    "WireMicroBatch",
    "decode",
    "encode",
    "read_prefix",
]
