"""The journal's writer: a queue that never blocks, and one thread that encodes, compresses, writes and flushes.

    event loop ── append ──▶ queue ──▶ thread: every `fsync_s` seconds, or at once when someone flushes
                                         1. rollouts that ended → a frame of the store, fsync
                                         2. all records          → a frame of the log, fsync

What a crash can lose is what was appended since the last commit: at most `fsync_s` seconds and the time of a commit
(a few milliseconds on a healthy disk). Whoever must not act before a record is durable awaits `flush`.

The store is written first, so that a rollout the log knows of is there. The other way round, after a crash between
the two, the store has rollouts that the log never heard of, which is harmless.

When the disk fails, nothing is dropped: what was not durable is kept and written again, to a new file, since after a
failed fsync nobody knows what the old one holds. `flush` raises meanwhile, and `on_error` is told once. When it is only
full, what it took of the last records is cut off again in the same file, they are tried again until there is room, and
`flush` waits, until `give_up`.

The queue has no bound of its own: who appends cannot be made to wait. When more bytes wait than `backlog_bytes`, `on_room`
is told, and whoever makes the records has to make fewer, until half of it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event as Signal
from threading import Thread
from typing import TypeAlias

import numpy as np

from paceline.domain.commands import Command
from paceline.domain.events import Event, GroupProcessed, RolloutEnded
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Rollout
from paceline.domain.sample import Sample
from paceline.errors import WireError, is_full
from paceline.journal.files import FOLDERS, next_seq
from paceline.journal.frames import EXTRAS, RECORDS, ROLLOUTS
from paceline.journal.output import Output
from paceline.journal.packing import Packer
from paceline.journal.retention import Retention

_log = logging.getLogger("paceline.journal")

FSYNC_S = 0.2
FILE_BYTES = 64 << 20
BACKLOG_BYTES = 256 << 20

_COMMIT_RECORDS = 4096
"""Most records of one commit: bounds what is in memory twice, and a frame's size."""

_BLOCK_TURNS, _BLOCK_TOKENS = 512, 1 << 16
"""Where a block of rollouts ends: building one holds the interpreter for less than a millisecond, and what is copied and
compressed stays in a core's own cache: four times as much took 0.38 ms a rollout of 8,190 tokens, and this
0.32 (the least of four tries each, other work running; single tries of either came to 0.45)."""

_FILES_KEPT = 8
"""Files of the store that a bound on its bytes is divided into."""

_RETRY_S = 1.0

_JOURNAL, _BACKLOG = "the journal", "the backlog of the journal"

_RECORD_BYTES = 300
"""Roughly what a record takes in memory, without arrays and messages."""

_ROLLOUT_BYTES = 1 << 16
"""Of a rollout, until the first were written; then what they took."""

Appended: TypeAlias = tuple[int, float, Event, Sequence[Command]]


class FileJournal:
    """Keeps events, commands and rollouts of one run in its directory. A `Journal`.

    Opened again after a crash it goes on behind the last durable record, in a new file. Thread-safe for one appending
    thread. `on_error` is called from the writing thread.
    """

    def __init__(
        self,
        run_dir: Path | str,
        run_id: str,
        *,
        fsync_s: float = FSYNC_S,
        file_bytes: int = FILE_BYTES,
        keep_steps: int | None = None,
        keep_bytes: int | None = None,
        backlog_bytes: int = BACKLOG_BYTES,
        on_error: Callable[[OSError | WireError], None] | None = None,
        on_room: Callable[[str, str], None] | None = None,
    ) -> None:
        """WireError if the directory holds another run's journal, or another process is writing it.

        `file_bytes`: a file of either kind is followed by another one then. `keep_steps` and `keep_bytes`: what
        `Retention` drops of the store; None keeps all. `on_room` is told, from any thread, what cannot be written and
        why; again whenever some of it was; and with an empty reason when it can.
        """
        root = Path(run_dir)
        for folder in FOLDERS.values():
            (root / folder).mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _locked(root / FOLDERS["log"] / "lock")
        try:
            log_seq = next_seq(root, "log", run_id)
            store_seq = next_seq(root, "rollouts", run_id)
        except BaseException:
            os.close(self._lock)
            raise
        # Rollouts of a commit whose records were lost have numbers that must not be given again.
        self._seq = max(log_seq, store_seq)
        self._durable = self._seq
        self._log = Output(root, "log", run_id, file_bytes, log_seq)
        self._retention: Retention | None = None
        store_bytes = file_bytes
        if keep_steps is not None or keep_bytes is not None:
            self._retention = Retention(root, steps=keep_steps, nbytes=keep_bytes)
        if keep_bytes is not None:  # whole files go: the bound is kept to within one of them
            store_bytes = max(1, min(file_bytes, keep_bytes // _FILES_KEPT))
        self._store = Output(root, "rollouts", run_id, store_bytes, store_seq)
        self._fsync_s = fsync_s
        self._on_error = on_error
        self._on_room = on_room or _untold
        self._most_behind = backlog_bytes
        self._ended = self._kept = 0
        """Rollouts that were appended, and those of them that are durable."""
        self._is_behind = self._is_full = False
        self._is_stored = False
        """Whether the store has the rollouts of `_held`, durable."""
        self._is_patient = True
        self._packer = Packer()
        self._queue: deque[Appended] = deque()
        self._held: list[Appended] = []
        """Taken from the queue, not durable yet."""
        self._waiting: deque[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._wake = Signal()
        self._closing = False
        self._error: OSError | None = None
        self._bug: Exception | None = None
        self._thread = Thread(target=self._run, name="paceline-journal", daemon=True)
        self._thread.start()

    @property
    def next_seq(self) -> int:
        """The number that the next record will get."""
        return self._seq

    @property
    def durable(self) -> int:
        """Records before this one are on disk."""
        return self._durable

    @property
    def backlog(self) -> int:
        """Records that are not durable yet."""
        return len(self._queue) + len(self._held)

    @property
    def backlog_bytes(self) -> int:
        """What they take in memory, roughly: to weigh each would cost the event loop more than all else here."""
        mean = self._packer.packed_bytes // (self._packer.packed or 1) or _ROLLOUT_BYTES
        return (self._seq - self._durable) * _RECORD_BYTES + (self._ended - self._kept) * mean

    @property
    def nbytes(self) -> int:
        """Bytes written by this process."""
        return self._log.written + self._store.written

    def needs(
        self, rollouts: Iterable[RolloutId], shipping: Mapping[int, tuple[RolloutId, ...]] = {}
    ) -> None:
        """What retention must leave of earlier lives; `shipping`: batches that were cut and not shipped. Call before the
        first record."""
        if self._retention is not None:
            self._retention.needed.add(rollouts, shipping)

    def append(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """Hand over one decision. Never blocks, never raises for a slow or failing disk."""
        self._queue.append((self._seq, at, event, tuple(commands)))
        self._seq += 1
        if type(event) is RolloutEnded:  # the rest is small, and every rollout ends
            self._ended += 1
            if not self._is_behind and self.backlog_bytes > self._most_behind:
                self._is_behind = True
                self._on_room(_BACKLOG, self._behind())
        if not self._fsync_s:
            self._wake.set()

    async def flush(self) -> None:
        """Return once everything appended so far is durable. Raises OSError while the disk fails."""
        if self._durable >= self._seq:
            return
        if self._closing or self._bug is not None or not self._thread.is_alive():
            raise OSError("the journal is closed") from self._bug
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((self._seq, loop, done))
        self._wake.set()
        await done

    def give_up(self) -> None:
        """Wait no longer for a disk that is full: `flush` raises from here on, while it is."""
        self._is_patient = False
        self._wake.set()

    async def close(self) -> None:
        """Make everything durable and stop. Raises OSError if that cannot be done; then the last records are lost."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._held or self._queue:
            raise OSError(f"{self.backlog} journal records could not be written") from (
                self._error or self._bug
            )

    # --- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(_RETRY_S if self._error else self._fsync_s or None)
                self._wake.clear()
                closing = self._closing
                self._commit_all()
                if closing:
                    return
        except Exception as error:
            # A mistake of ours, or the files are gone: whoever waits must hear of it rather than wait for ever.
            self._bug = error
            if self._on_error is not None:
                self._on_error(error if isinstance(error, WireError) else _stopped(error))
            self._answer(_stopped(error))
            if not isinstance(error, WireError):
                raise
        finally:
            self._log.abandon()
            self._store.abandon()
            if self._bug is not None:  # whoever has begun to wait since
                self._answer(_stopped(self._bug))

    def _commit_all(self) -> None:
        while self._held or self._queue:
            if not self._held:
                # After a failure it is the same records again: the same frames, which readers tell as repeated.
                take = min(len(self._queue), _COMMIT_RECORDS)
                self._held = [self._queue.popleft() for _ in range(take)]
            try:
                self._commit(self._held)
            except OSError as error:
                self._failed(error)
                return
            self._error = None
            self._durable = self._held[-1][0] + 1
            self._kept += sum([type(event) is RolloutEnded for _, _, event, _ in self._held])
            durable, self._held, self._is_stored = self._held, [], False
            self._tell_room()
            self._answer(None)
            self._drop_old(durable)
        self._answer(None)

    def _commit(self, records: list[Appended]) -> None:
        if not self._is_stored:  # else it would have them once more with each attempt
            blocks, extras = list(_blocks(records)), _extras(records)
            for block in blocks:
                first, last, rollouts = block
                ends = block is blocks[-1] and not extras
                self._store.write(ROLLOUTS, first, last, self._packer.rollouts(rollouts), ends=ends)
            if extras:
                self._store.write(EXTRAS, records[0][0], records[-1][0], self._packer.extras(extras))
            self._store.flush()
            self._is_stored = True
        self._log.write(RECORDS, records[0][0], records[-1][0], self._packer.records(records))
        self._log.flush()

    def _failed(self, error: OSError) -> None:
        was_broken = self._error is not None and not is_full(self._error)
        self._error = error
        if is_full(error):
            self._store.repair()
            self._log.repair()
            if not self._is_full:
                self._is_full = True
                self._on_room(_JOURNAL, str(error))
            if self._is_patient and not self._closing:
                return
        else:
            self._store.abandon()
            self._log.abandon()
            self._is_stored = False
            if not was_broken and self._on_error is not None:
                self._on_error(error)
        self._answer(error)

    def _tell_room(self) -> None:
        """After a commit."""
        if self._is_full:
            self._is_full = False
            self._on_room(_JOURNAL, "")
        if self._is_behind:
            self._is_behind = self.backlog_bytes > self._most_behind // 2
            self._on_room(_BACKLOG, self._behind() if self._is_behind else "")

    def _behind(self) -> str:
        return f"{self.backlog_bytes / 1e6:.0f} MB wait for a slow disk"

    def _drop_old(self, records: list[Appended]) -> None:
        if (retention := self._retention) is None:
            return
        for seq, _, event, commands in records:
            retention.see(seq, event, commands)
        try:
            retention.drop_if_due(self._store.begun)
        except OSError as error:  # what stays is in nobody's way but the disk's
            _log.warning("what journal.keep_token_* drops could not be removed: %s; it is tried again", error)

    def _answer(self, error: OSError | None) -> None:
        # Only those who wait by now: what failed is not the failure of a flush that is asked for meanwhile.
        for _ in range(len(self._waiting)):
            if error is None and self._waiting[0][0] > self._durable:
                return
            _, loop, done = self._waiting.popleft()
            with contextlib.suppress(RuntimeError):  # the loop is gone, and whoever waited on it too
                loop.call_soon_threadsafe(_resolve, done, error)


def _stopped(bug: Exception) -> OSError:
    if isinstance(bug, WireError):
        return OSError(str(bug))
    return OSError(f"the journal's writer stopped: {bug!r}")


def _resolve(done: asyncio.Future[None], error: OSError | None) -> None:
    if not done.done():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _untold(_what: str, _why: str) -> None:
    """Nobody asked to be told of room."""


def _blocks(records: list[Appended]) -> Iterator[tuple[int, int, list[Rollout]]]:
    """(first seq, last seq, rollouts) of each block of rollouts that ended in these records."""
    rollouts: list[Rollout] = []
    first = last = turns = tokens = 0
    for seq, _, event, _ in records:
        if type(event) is not RolloutEnded:
            continue
        if not rollouts:
            first, turns, tokens = seq, 0, 0
        rollout, last = event.rollout, seq
        rollouts.append(rollout)
        turns += 1 + len(rollout.turns)
        tokens += rollout.sampled_tokens + rollout.prompt_tokens
        if turns >= _BLOCK_TURNS or tokens >= _BLOCK_TOKENS:
            yield first, last, rollouts
            rollouts = []
    if rollouts:
        yield first, last, rollouts


def _extras(records: list[Appended]) -> list[tuple[int, Sample]]:
    """Samples of these records that are more than tokens of their rollout and one advantage, with their numbers."""
    return [
        (number, sample)
        for _, _, event, _ in records
        if type(event) is GroupProcessed
        for verdict in event.result.verdicts
        for number, sample in enumerate(verdict.samples)
        if sample.streams or isinstance(sample.advantage, np.ndarray)
    ]


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise WireError(
            f"{path} is locked: another process writes this run's journal; end it, or choose another directory"
        ) from error
    except OSError:
        pass  # a file system without locks: that a run is started once is then up to whoever starts it
    return handle
