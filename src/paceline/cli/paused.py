"""Servers that a run has paused, remembered in its directory: a run that is killed meanwhile leaves them paused.

    RUN/paused/NAME.json   {"url": ..., "version": what it was to be given}   from the pause until it works again

`paceline run --resume` makes them work again before anything else. It is sure that the pause was this run's own when
nobody else runs in the directory, the server says that it is paused, and holds no newer version than it was to be given.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.cli.rundir import RunLock, existing_run_dir
from paceline.config import EmbeddedEngine, RunConfig, SglangEngine
from paceline.domain.ids import Version
from paceline.engines.http import Limits, Link, Retry
from paceline.engines.http.weights import read_version
from paceline.errors import EngineError
from paceline.transport.layout import replace_file

log = logging.getLogger(__name__)

FOLDER = "paused"
_LIMITS = Limits(admin_s=10.0)


class Mark(msgspec.Struct, frozen=True):
    url: str
    version: Version


class FileMarks:
    """`PauseMarks` in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    def paused(self, url: str, version: Version) -> None:
        self._folder.mkdir(exist_ok=True)
        replace_file(self._file(url), msgspec.json.encode(Mark(url, version)))

    def resumed(self, url: str) -> None:
        self._file(url).unlink(missing_ok=True)

    def has(self, url: str) -> bool:
        """Whether its last update of weights was not finished: what it holds is not known."""
        return self._file(url).exists()

    def all(self) -> list[Mark]:
        """Servers that were paused and not resumed."""
        return [
            msgspec.json.decode(path.read_bytes(), type=Mark) for path in sorted(self._folder.glob("*.json"))
        ]

    def _file(self, url: str) -> Path:
        return self._folder / f"{hashlib.blake2b(url.rstrip('/').encode(), digest_size=8).hexdigest()}.json"


async def resume_paused(config: RunConfig, resume: str, say: Callable[[str], None]) -> None:
    """Let servers work again that an earlier life of the run to be resumed has paused."""
    if isinstance(config.engine, EmbeddedEngine):
        return
    run_dir = existing_run_dir(config, resume)
    marks = FileMarks(run_dir).all()
    if not marks:
        return
    with RunLock(run_dir, say):  # nobody is about to resume it himself
        for mark in marks:
            say(await _resume(mark, config))


async def _resume(mark: Mark, config: RunConfig) -> str:
    section = config.engine
    assert not isinstance(section, EmbeddedEngine)
    key = os.environ.get(section.api_key_env) if section.api_key_env else None
    link = Link(mark.url, f"engine at {mark.url}", _LIMITS, Retry(), key)
    try:
        return (
            f"{link.name}: {await _work_again(link, mark, isinstance(section, SglangEngine), section.load_s)}"
        )
    except EngineError as error:
        return f"{link.name}: was left paused: {error}"
    finally:
        await link.close()


async def _work_again(link: Link, mark: Mark, is_sglang: bool, load_s: float) -> str:
    """What was found and done. EngineError when the server does not answer, or refuses."""
    if is_sglang:
        await link.demand("POST", "/continue_generation", {})
        return "was left paused by this run, and works again"
    answer = await link.call("GET", "/is_paused")
    if answer.body.replace(b" ", b"") != b'{"is_paused":true}':
        return "was left paused by this run, and works again by now"
    held = await read_version(link)
    if held is not None and held > mark.version:
        return f"is paused and holds v{held}, newer than this run gave it: left as it is"
    # A load may have been begun; a server that goes on inside of it dies at its next request. Where none was, it says so.
    try:
        await link.call("POST", "/finish_weight_update", {}, repeatable=False, within_s=load_s)
    except EngineError as error:
        log.info("%s", error)
    await link.demand("POST", "/resume")
    return "was left paused by this run, and works again"
