"""Engines that come and go during a run: the run directory holds a list of addresses, which people edit.

    RUN/engines.txt ──(read every 2 s)──▶ an address that is new     reached, given the initial weights, told to the core
                                     └──▶ an address that is gone    no new call; closed when its calls have ended

The run writes the list when it starts, from its config. `paceline engines RUN --add URL` edits it, and so does any
editor. A list that cannot be read, or names no engine, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from paceline.errors import ConfigError
from paceline.transport.layout import replace_file

log = logging.getLogger(__name__)

FILE = "engines.txt"
EVERY_S = 2.0
_HEAD = (
    "# The engines of this run, an address a line. Add one or take one out while it runs; the run notices.\n"
)


def read_list(run_dir: Path) -> tuple[str, ...]:
    """The addresses, in order. ConfigError names the line that is none, or says that there are none."""
    path = run_dir / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            found[checked(text, f"{path}, line {number}")] = None
    if not found:
        raise ConfigError(
            f"{path} names no engine: a run needs one; stop the run with Ctrl-C if it should end"
        )
    return tuple(found)


def checked(address: str, where: str) -> str:
    """An engine's address. ConfigError when it cannot be one."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{where}: {address!r} is no address of an engine, such as http://gpu-0:8000")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{where}: an address may hold no user and no password; the token is in engine.api_key_env"
        )
    return address.rstrip("/")


def write_list(run_dir: Path, addresses: tuple[str, ...]) -> None:
    """Write it whole, so that the run never reads half of it."""
    replace_file(run_dir / FILE, (_HEAD + "".join(f"{a}\n" for a in addresses)).encode())


async def follow(
    run_dir: Path,
    now: Callable[[], set[str]],
    add: Callable[[str], None],
    remove: Callable[[str], None],
    every_s: float = EVERY_S,
) -> NoReturn:
    """Look at the list again and again, and tell what changed. `now`: the addresses in use or being reached."""
    said = ""
    while True:
        try:
            wanted = await asyncio.to_thread(read_list, run_dir)
        except ConfigError as error:
            if str(error) != said:  # once, not every 2 s
                log.warning("%s; the engines in use stay", error)
            said = str(error)
        else:
            said = ""
            have = now()
            for address in wanted:
                if address not in have:
                    add(address)
            for address in have.difference(wanted):
                remove(address)
        await asyncio.sleep(every_s)
