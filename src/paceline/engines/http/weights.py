"""New weights into one running server, without losing what it is working on.

    pause (keep) ─▶ load ─▶ label ─▶ check the label ─▶ resume
                       any failure ───────────────────────▲

Requests in flight freeze at the pause and go on under the new weights; their KV is computed anew, unless
`keep_kv`. Nothing may sample between the start and the end of a load: a vLLM server dies of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from paceline.domain.ids import Version
from paceline.domain.transfer import TRANSFER_FILE, Transfer
from paceline.engines.http.link import Answer, Link
from paceline.engines.http.wire import error_text, label_of, version_of
from paceline.errors import EngineError
from paceline.ports import PauseMarks

log = logging.getLogger(__name__)

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 (vLLM 0.16 or later)"


class LoadRoute(Enum):
    """How a server takes weights from a directory."""

    PHASES = "start_weight_update, update_weights, finish_weight_update"
    RELOAD = "collective_rpc reload_weights"


class _Label(msgspec.Struct, frozen=True, gc=False):
    weight_version: str


async def read_version(link: Link) -> Version | None:
    """The version the server says it holds; None when it has no such route. EngineError for a foreign label."""
    answer = await link.call("GET", "/weight_info")
    if answer.status != 200:
        return None
    try:
        return version_of(msgspec.json.decode(answer.body, type=_Label).weight_version)
    except (msgspec.DecodeError, EngineError) as error:
        raise EngineError(f"{link.name}: /weight_info: {error}") from None


def expect_version(link: Link, held: Version | None, version: Version, path: str) -> None:
    """EngineError when a server that says what it holds holds something else than it was given."""
    if held not in (None, version):
        raise EngineError(f"{link.name}: was given v{version} from {path}, but says it holds v{held}")


@asynccontextmanager
async def resumed_after(
    resume: Callable[[bool], Awaitable[None]], marks: PauseMarks | None, url: str, version: Version
) -> AsyncIterator[None]:
    """Resume a paused server afterwards, whatever happens meanwhile; what went wrong goes on. `resume` is told whether
    all went well: a server that has just failed is not waited for again and again. `marks` hears of both, so that the
    next life of a run that is killed in between can do it."""
    if marks is not None:
        marks.paused(url, version)
    try:
        yield
    except BaseException:
        # Also when cancelled: a server left paused serves nobody, for ever.
        try:
            await resume(False)
        except EngineError as error:
            log.error("%s; it may still be paused", error)
        raise
    await resume(True)
    if marks is not None:
        marks.resumed(url)


@asynccontextmanager
async def stopped_unless_loaded(stop: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """`stop` the calls in flight if what happens in the block fails."""
    try:
        yield
    except BaseException:
        await stop()
        raise


class WeightLoader:
    """Loads versions into one server; one load at a time is the caller's care."""

    def __init__(self, link: Link, *, keep_kv: bool = False, marks: PauseMarks | None = None) -> None:
        self._link, self._keep_kv, self._marks = link, keep_kv, marks
        self._route: LoadRoute | None = None
        self._group: dict[str, Any] | None = None
        """Of a trainer that sends its weights: the group that the server has joined."""

    async def load(self, version: Version, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Returns once the server holds `version` and works again.

        EngineError with the engine and the cause otherwise; then the server works again if it can be made to, but what
        it holds is not to be trusted: `stop` has ended the calls it had in flight before.
        """
        link, clear = self._link, "false" if self._keep_kv else "true"
        async with resumed_after(self._resume, self._marks, link.url, version):
            # A server that lets this wait hangs: two more waits would say the same.
            paused = await link.call("POST", f"/pause?mode=keep&clear_cache={clear}", waits_again=False)
            if paused.is_missing:
                raise EngineError(f"{link.name}: cannot be paused, so cannot take new weights: {_DEV_MODE}")
            _succeeded(link, "/pause", paused)
            async with stopped_unless_loaded(stop):
                await self._load(version, path)
                expect_version(link, await read_version(link), version, path)

    async def _resume(self, went_well: bool) -> None:
        await self._link.demand("POST", "/resume", waits_again=went_well)

    async def _load(self, version: Version, path: str) -> None:
        sent = await asyncio.to_thread(_read_transfer, path)
        if sent is not None:
            await self._receive(version, sent, path)
            return
        if self._route is not LoadRoute.RELOAD:
            started = await self._start()
            if started:
                await self._phases(version, {"path": path}, path)
                self._route = LoadRoute.PHASES
                return
        await self._reload(version, path)
        self._route = LoadRoute.RELOAD

    async def _start(self) -> bool:
        """Begin a load in phases; False when the server does not load that way."""
        link = self._link
        try:
            answer = await link.call("POST", "/start_weight_update", {}, repeatable=False)
        except EngineError as error:
            if self._route is None and "not configured" in str(error):
                return False
            raise
        if self._route is None and answer.is_missing:
            return False
        _succeeded(link, "/start_weight_update", answer)
        return True

    async def _receive(self, version: Version, sent: Transfer, path: str) -> None:
        """Take weights that the trainer sends to the server itself, in the words of vLLM's documented routes."""
        link = self._link
        rank = sent.rank_offsets.get(link.url)
        if rank is None:
            raise EngineError(
                f"{link.name}: {path} is sent to {', '.join(sent.rank_offsets)}: name this server to the trainer's sender, "
                "too"
            )
        if self._group != sent.init_info:
            await link.demand(
                "POST",
                "/init_weight_transfer_engine",
                {"init_info": {**sent.init_info, "rank_offset": rank}},
                within_s=link.limits.load_weights_s,
                repeatable=False,
            )
            self._group = sent.init_info
        await link.demand("POST", "/start_weight_update", {}, repeatable=False)
        await self._phases(version, sent.update_info, path)

    async def _phases(self, version: Version, update_info: dict[str, Any], path: str) -> None:
        link, patience = self._link, self._link.limits.load_weights_s
        try:
            answer = await link.call(
                "POST",
                "/update_weights",
                {"update_info": update_info},
                within_s=patience,
                repeatable=False,
            )
            _succeeded(link, f"/update_weights from {path}", answer)
        except BaseException:
            # The load was begun; a server that resumes inside it dies at its next request. It keeps its old label.
            try:
                await link.call("POST", "/finish_weight_update", {}, within_s=patience, repeatable=False)
            except EngineError as error:
                log.error("%s; its load was not ended", error)
            raise
        await link.demand(
            "POST",
            "/finish_weight_update",
            {"weight_version": label_of(version)},
            within_s=patience,
            repeatable=False,
        )

    async def _reload(self, version: Version, path: str) -> None:
        link = self._link
        answer = await link.call(
            "POST",
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": path}},
            within_s=link.limits.load_weights_s,
            repeatable=True,
        )
        if answer.is_missing:
            raise EngineError(f"{link.name}: has no route that loads weights from a directory: {_DEV_MODE}")
        _succeeded(link, f"/collective_rpc reload_weights from {path}", answer)
        labelled = await link.call("POST", "/update_weight_version", {"new_version": label_of(version)})
        if not labelled.is_missing:  # vLLM before 0.28 keeps no label
            _succeeded(link, "/update_weight_version", labelled)


def _read_transfer(path: str) -> Transfer | None:
    """How a version is sent, where it is not in files."""
    try:
        return msgspec.json.decode((Path(path) / TRANSFER_FILE).read_bytes(), type=Transfer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(f"{path}/{TRANSFER_FILE} cannot be read: {error}") from error


def _succeeded(link: Link, what: str, answer: Answer) -> None:
    if answer.status != 200:
        raise EngineError(f"{link.name}: {what} answered {answer.status}: {error_text(answer.body)}")
