"""The probes of a published version: `probe.json` beside its weights. Optional for a trainer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.domain.probe import Probe
from paceline.errors import TrainerError
from paceline.transport.layout import PROBE_FILE


class _Probes(msgspec.Struct, frozen=True, gc=False):
    probes: list[Probe]


def read_probes(directory: Path) -> list[Probe]:
    """Empty when the trainer wrote none. TrainerError if they cannot be read."""
    path = directory / PROBE_FILE
    try:
        data = path.read_bytes()
    except OSError:
        return []
    try:
        probes = msgspec.json.decode(data, type=_Probes).probes
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TrainerError(f"{path} is no list of probes: {error}") from error
    for number, probe in enumerate(probes):
        if not probe.token_ids or not probe.next:
            raise TrainerError(f"{path}: probe {number} has no token_ids, or no next")
    return probes
