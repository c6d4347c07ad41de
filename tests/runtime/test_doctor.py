"""Checks run at once and each for itself."""

from __future__ import annotations

import asyncio
import threading
import time

from paceline.errors import ConfigError
from paceline.runtime.doctor import Finding, examine

OK = Finding("ok", "fine")


async def test_all_checks_are_heard_in_their_order_whatever_each_of_them_does() -> None:
    released = threading.Event()

    async def hangs() -> list[Finding]:
        await asyncio.sleep(60)
        return [OK]

    def blocks() -> list[Finding]:
        released.wait(60)
        return [OK]

    def refuses() -> list[Finding]:
        raise ConfigError("model.name = 'x': no such directory")

    def quits() -> list[Finding]:
        raise SystemExit(3)

    began = time.monotonic()
    checks = {"a": lambda: [OK, OK], "b": hangs, "c": blocks, "d": refuses, "e": quits, "f": list}
    found = await examine(checks, limit_s=0.2)
    released.set()
    assert time.monotonic() - began < 2
    assert [finding.level for finding in found] == ["ok", "ok", "warning", "warning", "error", "error"]
    assert found[2].what == "b: not known within 0.2 s"
    assert found[4] == Finding("error", "d", "model.name = 'x': no such directory")
    assert "SystemExit(3)" in found[5].facts
