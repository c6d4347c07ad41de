"""Runs many checks at once, each for itself, and gathers what they find; nothing is asked one by one.

What is checked is the caller's business: see `paceline.cli.checks`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from paceline.errors import PacelineError

Level: TypeAlias = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, gc=False):
    """One thing that was looked at. An `error` keeps the run from working, a `warning` does not."""

    level: Level
    what: str
    """What is right or wrong, in a line."""
    facts: str = ""
    """Both sides of a mismatch, or what was seen."""
    remedy: str = ""
    """What to do; empty when nothing needs doing."""


Findings: TypeAlias = Sequence[Finding]
Check: TypeAlias = Callable[[], Findings] | Callable[[], Awaitable[Findings]]
"""Plain functions run in threads of their own: they may import a user's code, which may do anything."""


async def examine(checks: Mapping[str, Check], *, limit_s: float = 4.5) -> list[Finding]:
    """What all the checks find, in their order. One that fails or takes longer than `limit_s` is a finding too."""
    found = await asyncio.gather(*(_examine(name, check, limit_s) for name, check in checks.items()))
    return [finding for findings in found for finding in findings]


async def _examine(name: str, check: Check, limit_s: float) -> Findings:
    try:
        async with asyncio.timeout(limit_s):
            if asyncio.iscoroutinefunction(check):
                findings: Findings = await check()
                return findings
            return await _in_thread(check)  # type: ignore[arg-type]
    except TimeoutError:
        return [
            Finding(
                "warning",
                f"{name}: not known within {limit_s:g} s",
                "the check did not come back",
                "look at what it waits for: an import, a file system or a server",
            )
        ]
    except PacelineError as error:
        return [Finding("error", name, str(error))]
    except Exception as error:
        return [Finding("error", f"{name}: the check itself failed", f"{type(error).__name__}: {error}")]


async def _in_thread(check: Callable[[], Findings]) -> Findings:
    """Like `asyncio.to_thread`, but a check that never returns does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Findings] = loop.create_future()

    def settle(findings: Findings | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(findings or ())

    def work() -> None:
        findings, failure = None, None
        try:
            findings = check()
        except BaseException as error:  # a user's module may raise SystemExit
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, findings, failure)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await future
