"""The run's journal, and what becomes of the run where its disk is full, slow or gone. See `docs/disk.md`.

journal thread ─ no room, room again ─▶ Room: the run is held, or ends
               ─ any other error ─────▶ `watch` raises: the run ends
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.config import JournalSection
from paceline.errors import WireError
from paceline.journal.writer import FileJournal
from paceline.runtime.room import Room


class Storing:
    """Opens the journal of one life of a run. On the loop of the run."""

    def __init__(self, run_dir: Path, run_id: str, section: JournalSection) -> None:
        loop = asyncio.get_running_loop()
        self._room: Room | None = None
        self._error: OSError | WireError | None = None
        self._failed = asyncio.Event()

        def failed(error: OSError | WireError) -> None:
            self._error = error
            loop.call_soon_threadsafe(self._failed.set)

        def room(what: str, why: str) -> None:
            loop.call_soon_threadsafe(self.room_for, what, why)

        self.journal = FileJournal(
            run_dir,
            run_id,
            fsync_s=section.fsync_s,
            file_bytes=_bytes(section.file_mb),
            keep_steps=section.keep_token_steps,
            keep_bytes=None if section.keep_token_mb is None else _bytes(section.keep_token_mb),
            backlog_bytes=_bytes(section.backlog_mb),
            on_error=failed,
            on_room=room,
        )

    def attach(self, room: Room) -> None:
        """The run is driven from now on: `room` is told what cannot be written, and was nobody's to hear before."""
        self._room = room

    def room_for(self, what: str, why: str) -> None:
        """`what` cannot be written, because of `why`; where that is empty, it can be again."""
        if self._room is not None:
            if why:
                self._room.missing(what, why)
            else:
                self._room.found(what)

    async def watch(self) -> None:
        """A journal that cannot be written ends the run: what it did from then on could not be told."""
        await self._failed.wait()
        error = self._error or OSError("the disk failed")
        if isinstance(
            error, WireError
        ):  # its files have been removed: there is no disk to mend, and little to resume
            raise error
        raise OSError(error.errno, f"{error.strerror or error}: mend the disk and resume", error.filename)

    def give_up(self) -> None:
        """The run fails: its end waits for no disk."""
        if self._room is not None:
            self._room.close()
        self.journal.give_up()


def _bytes(mb: float) -> int:
    return max(1, round(mb * 1e6))
