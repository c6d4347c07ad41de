"""A trainer whose disk has no room waits for it, and says so where the run can see it.

    trainer ── no room ──▶ RUN/trainer_waits.json ──▶ the run: held, and why

A version of a large policy may not fit where a journal still can be written. Then nobody but the trainer knows what the
run waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.errors import WireError, full_in_words, is_full
from paceline.transport.layout import TRAINER_WAITS, replace_file

RETRY_S = 1.0
"""Between two attempts to write to a disk that is full."""


class TrainerWaits(msgspec.Struct, frozen=True, kw_only=True):
    """What `trainer_waits.json` holds. It is there only while the trainer waits."""

    what: str
    """What it cannot write, such as "weights v3"."""
    why: str


def write_with_room(
    run_dir: Path | str,
    what: str,
    write: Callable[[], object],
    *,
    stop: Callable[[], bool] | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Call `write`; on a disk that is full again, every second, until there is room or `stop` returns true.

    Meanwhile the run knows what is waited for: it starts nothing new, and ends after `journal.full_disk_s`. `tell` is
    given the reason, once. Raises whatever else `write` raises, and the want of room itself when it is to stop.
    """
    place = Path(run_dir) / TRAINER_WAITS
    told = False
    try:
        while True:
            try:
                write()
            except Exception as error:
                if not is_full(error) or (stop is not None and stop()):
                    raise
                why = full_in_words(error)
                if not told and tell is not None:
                    tell(why)
                told = True
                _say(place, TrainerWaits(what=what, why=why))
                time.sleep(RETRY_S)
            else:
                return
    finally:
        if told:
            place.unlink(missing_ok=True)


def _say(place: Path, waits: TrainerWaits) -> None:
    try:
        if not place.exists():  # or a resumed run has removed it
            replace_file(place, msgspec.json.encode(waits) + b"\n")
    except OSError as error:
        if not is_full(error):
            raise
        # There is no room even for this, and that the run finds by itself.


def trainer_waits(run_dir: Path | str) -> TrainerWaits | None:
    """What the trainer waits to write; None while it waits for nothing. WireError if the file is none of these."""
    place = Path(run_dir) / TRAINER_WAITS
    try:
        return msgspec.json.decode(place.read_bytes(), type=TrainerWaits)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(
            f"{place} is not what a trainer that waits for room writes: {error}; remove it, and write it as "
            "paceline.write_with_room does"
        ) from error
