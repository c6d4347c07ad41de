"""Parts of rollouts under way, beside the journal for as long as their rollouts have not ended.

    event loop ── keep, ended ──▶ queue ──▶ thread, every `fsync_s` seconds
                                              1. parts whose rollout has not ended meanwhile → a frame, fsync
                                              2. a file of which every rollout has its record, durable, goes

`docs/continuing.md` says what they are for. Losing them costs tokens and nothing else, so a disk that refuses them does
not end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from threading import Event as Signal
from threading import Thread
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import zstandard

from paceline.domain.commands import Command
from paceline.domain.events import Event, RolloutEnded
from paceline.domain.ids import EngineId, RolloutId
from paceline.domain.part import Asked, Part
from paceline.domain.rollout import Finish, VersionRuns
from paceline.errors import WireError, is_full
from paceline.journal.files import FOLDERS, file_numbers, file_path
from paceline.journal.frames import PARTS, FrameReader
from paceline.journal.output import Output
from paceline.journal.packing import LEVEL

_log = logging.getLogger("paceline.journal")

FSYNC_S: Final = 0.2

FILE_BYTES: Final = 16 << 20
"""A file goes as a whole: with smaller ones, less stays for the sake of one rollout that takes long."""

_BLOCK_PARTS, _BLOCK_TOKENS = 512, 1 << 18
"""Where a frame ends: building one holds the interpreter for about a millisecond."""


class Numbered(Protocol):
    """The journal, as far as parts wait for it."""

    @property
    def next_seq(self) -> int: ...

    @property
    def durable(self) -> int:
        """Records before this one are on disk."""
        ...


class _Line(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A part as it is written; arrays are bytes, little-endian."""

    rollout: RolloutId
    number: int
    turn: int
    before: int
    after: int
    versions: VersionRuns
    finish: Finish
    asked: Asked
    engine: EngineId
    cached_tokens: int
    queued_s: float
    started: float
    ended: float
    model_s: float
    prompt_ids: bytes
    sampled_ids: bytes
    logprobs: bytes
    behind: int | None = None


class PartStore:
    """Keeps what rollouts under way have sampled. For one thread that calls it; writes in one of its own."""

    def __init__(
        self,
        run_dir: Path | str,
        run_id: str,
        journal: Numbered,
        *,
        goes_on: Collection[RolloutId] = (),
        fsync_s: float = FSYNC_S,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """`goes_on`: rollouts of earlier lives whose parts are still needed; the others' go."""
        self._root = Path(run_dir)
        (self._root / FOLDERS["partial"]).mkdir(parents=True, exist_ok=True)
        self._output = Output(self._root, "partial", run_id, file_bytes, 0)
        self._files = {number: _rollouts_in(self._root, number) & set(goes_on) for number in self._numbers()}
        """Rollouts under way of which each file has parts."""
        self._fsync_s = fsync_s
        self._journal = journal
        self._queue: deque[Part | RolloutId] = deque()
        self._recorded: deque[tuple[int, RolloutId]] = deque()
        """Rollouts that have ended, by the record behind theirs."""
        self._wake = Signal()
        self._closing = self._is_off = self._is_refused = False
        self.written = 0
        """Parts written by this process."""
        self._thread = Thread(target=self._run, name="paceline-partial", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes written by this process."""
        return self._output.written

    def keep(self, part: Part) -> None:
        """Never blocks, never raises for the disk."""
        if not self._is_off:
            self._queue.append(part)
            if not self._fsync_s:
                self._wake.set()

    def ended(self, rollout: RolloutId) -> None:
        """It is about to have its record: no more of it needs to be written."""
        if not self._is_off:
            self._queue.append(rollout)

    def apply(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """What is handed to the journal. A record that is not durable yet may be lost with this process, and its rollout then
        goes on from its parts."""
        if type(event) is RolloutEnded and not self._is_off:
            self._recorded.append((self._journal.next_seq, event.rollout.id))

    async def close(self) -> None:
        """Write what is left, and stop. Files without a rollout under way are gone then; what the journal could not make
        durable keeps its parts."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    # ── in the thread ──

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(self._fsync_s or None)
                self._wake.clear()
                closing = self._closing
                self._take()
                self._drop(closing)
                if closing:
                    return
        except Exception:  # our bug: a run that goes on would lose more by a kill, and is not ended for it
            _log.exception("partial rollouts are not kept from here on")
        finally:
            self._is_off = True
            self._queue.clear()
            self._output.abandon()

    def _take(self) -> None:
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        over = {each for each in taken if isinstance(each, RolloutId)}
        parts = [each for each in taken if isinstance(each, Part) and each.rollout not in over]
        if not parts:
            return
        try:
            made = list(blocks(parts))
            for block in made:
                last = self.written + len(block) - 1
                self._output.write(PARTS, self.written, last, packed(block), ends=block is made[-1])
                self.written += len(block)
                self._files.setdefault(self._numbers()[-1], set()).update(part.rollout for part in block)
            self._output.flush()
        except OSError as error:
            if is_full(error):
                self._output.repair()
            else:
                self._output.abandon()
            for number in self._numbers():  # one that was begun for what it did not take must go, too
                self._files.setdefault(number, set())
            if not self._is_refused:
                _log.warning(
                    "a kill would cost rollouts their tokens: their parts cannot be written: %s", error
                )
            self._is_refused = True
            return
        self._is_refused = False

    def _drop(self, closing: bool) -> None:
        durable = self._journal.durable
        while self._recorded and self._recorded[0][0] <= durable:
            _, rollout = self._recorded.popleft()
            for rollouts in self._files.values():
                rollouts.discard(rollout)
        if closing:
            self._output.abandon()
        current = None if closing else max(self._files, default=None)
        for number in [n for n, rollouts in self._files.items() if not rollouts and n != current]:
            del self._files[number]
            try:
                file_path(self._root, "partial", number).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("what is left of rollouts that have ended cannot be removed: %s", error)

    def _numbers(self) -> list[int]:
        return file_numbers(self._root, "partial")


def read_parts(run_dir: Path | str, rollouts: Collection[RolloutId]) -> dict[RolloutId, list[Part]]:
    """What was written of rollouts, in order. Damage ends what can be read of a file: it costs tokens, not the run."""
    found: dict[RolloutId, list[Part]] = {}
    wanted = set(rollouts)
    root = Path(run_dir)
    for number in file_numbers(root, "partial"):
        for line in _lines_in(root, number):
            if line.rollout in wanted:
                found.setdefault(line.rollout, []).append(_part(line))
    return found


def _rollouts_in(root: Path, number: int) -> set[RolloutId]:
    return {line.rollout for line in _lines_in(root, number)}


def _lines_in(root: Path, number: int) -> Iterator[_Line]:
    path = file_path(root, "partial", number)
    try:
        with FrameReader(path) as reader:
            while (frame := reader.next()) is not None:
                if frame.kind == PARTS:
                    yield from _decoder.decode(zstandard.ZstdDecompressor().decompress(frame.payload))
    except (WireError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        _log.warning("%s cannot be read to its end, so rollouts go on with fewer tokens: %s", path, error)


_decoder = msgspec.msgpack.Decoder(list[_Line])


def packed(block: Sequence[Part]) -> bytes:
    """The payload of a frame."""
    lines = msgspec.msgpack.encode([_line(part) for part in block])
    return zstandard.ZstdCompressor(level=LEVEL).compress(lines)


def blocks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """As many as one frame takes."""
    block: list[Part] = []
    tokens = 0
    for part in parts:
        block.append(part)
        tokens += len(part.prompt_ids) + part.tokens
        if len(block) >= _BLOCK_PARTS or tokens >= _BLOCK_TOKENS:
            yield block
            block, tokens = [], 0
    if block:
        yield block


def _line(part: Part) -> _Line:
    return _Line(
        part.rollout,
        part.number,
        part.turn,
        part.before,
        part.after,
        part.versions,
        part.finish,
        part.asked,
        part.engine,
        part.cached_tokens,
        part.queued_s,
        part.started,
        part.ended,
        part.model_s,
        part.prompt_ids.astype("<i4", copy=False).tobytes(),
        part.sampled_ids.astype("<i4", copy=False).tobytes(),
        part.logprobs.astype("<f4", copy=False).tobytes(),
        part.behind,
    )


def _part(line: _Line) -> Part:
    fields: dict[str, Any] = {name: getattr(line, name) for name in _Line.__struct_fields__}
    for name, kind, dtype in (
        ("prompt_ids", "<i4", np.int32),
        ("sampled_ids", "<i4", np.int32),
        ("logprobs", "<f4", np.float32),
    ):
        fields[name] = np.frombuffer(fields[name], kind).astype(dtype, copy=False)
    return Part(**fields)
