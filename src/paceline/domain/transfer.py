"""A version whose weights are not in files: the trainer sends them to the engines itself, over NCCL."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from paceline.domain.ids import Version

TRANSFER_FILE: Final = "transfer.json"
"""In the directory of such a version, instead of weights."""


class Transfer(msgspec.Struct, frozen=True):
    """What an engine has to be told to take part, in the words of vLLM's routes."""

    version: Version
    init_info: dict[str, Any]
    """For `/init_weight_transfer_engine`, but for the rank: master_address, master_port, world_size, packed, …"""
    rank_offsets: dict[str, int]
    """By the address of a server: the rank of its first GPU in the group; the trainer is rank 0."""
    update_info: dict[str, Any]
    """For `/update_weights`: names, dtype_names and shapes, in the order in which they are sent."""
