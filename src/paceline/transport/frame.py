"""What every file of the wire format has: a prefix, a header, named arrays. `docs/wire.md` is its description."""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from paceline.errors import WireError

MAGIC = b"\x89PLB\r\n\x1a\n"
"""Not text, not UTF-8, and broken by any transfer that rewrites line ends."""

FORMAT = 1
"""Goes up when an old reader would misread, not when something is added."""

PREFIX_BYTES = 64
ALIGNMENT = 64

PREFIX = struct.Struct("<8sHHIQ8x32s")
"""Magic, format, reserved, header bytes, file bytes, reserved, digest of all other bytes."""

DIGESTED = 32
"""The digest covers the first 32 bytes and everything behind the prefix."""

MAX_HEADER_BYTES = 16 << 20

ENDINGS = ("completed", "truncated", "failed", "cancelled")

DTYPES = {
    code: np.dtype("<" + code) for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
}

Buffer: TypeAlias = bytes | bytearray | memoryview


class Header(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    step: int
    trains: int
    rank: int
    ranks: int
    envs: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...] = ()
    """(name, dtype, shape, offset from the first array)."""


class Prefix(NamedTuple):
    """What the first 64 bytes of a file say."""

    header_bytes: int
    file_bytes: int
    digest: str


def read_prefix(data: Buffer, *, name: str = "<buffer>") -> Prefix:
    """Check the first 64 bytes. WireError unless they are those of a file this version reads."""
    if len(data) < PREFIX_BYTES:
        raise WireError(f"{name} is cut off: {len(data)} bytes, the prefix alone has {PREFIX_BYTES}")
    magic, format_, _, header_bytes, file_bytes, digest = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"{name} is no Paceline batch: it begins with {magic!r}, not {MAGIC!r}")
    if format_ != FORMAT:
        raise WireError(
            f"{name} has wire format {format_}, this Paceline reads {FORMAT}: "
            "use the same release for orchestrator and trainer"
        )
    if header_bytes > MAX_HEADER_BYTES or PREFIX_BYTES + header_bytes > file_bytes:
        raise WireError(
            f"{name} states a header of {header_bytes} bytes in a file of {file_bytes}; "
            f"at most {MAX_HEADER_BYTES} are read"
        )
    return Prefix(header_bytes, file_bytes, digest.hex())
