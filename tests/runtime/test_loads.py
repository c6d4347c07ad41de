"""The load poller: it reports what engines say, and their silence, and never more."""

from __future__ import annotations

import asyncio
import logging

import pytest

from paceline.domain.events import LoadReported
from paceline.domain.load import EngineInfo, EngineLoad
from paceline.errors import EngineError
from paceline.runtime.loads import poll_load

LOAD = EngineLoad(running=1, waiting=0, kv_usage=0.5, preemptions=0)


class Scripted:
    """An engine whose `load` does what the script says, one entry a call, then hangs."""

    info = EngineInfo(id="e0", kv_tokens=None, max_model_len=None)

    def __init__(self, *script: EngineLoad | Exception | None) -> None:
        self.script, self.asked, self.inside, self.overlapped = list(script), 0, 0, False

    async def load(self) -> EngineLoad:
        self.asked += 1
        self.overlapped |= self.inside > 0
        self.inside += 1
        try:
            says = self.script.pop(0) if self.script else None
            if says is None:
                await asyncio.sleep(3600)
            if isinstance(says, Exception):
                raise says
            assert says is not None
            return says
        finally:
            self.inside -= 1


async def reports_of(engine: Scripted, count: int) -> list[LoadReported]:
    reports: list[LoadReported] = []
    enough = asyncio.Event()

    def post(report: LoadReported) -> None:
        reports.append(report)
        if len(reports) == count:
            enough.set()

    poller = asyncio.ensure_future(poll_load(engine, post, interval_s=0.001, limit_s=0.02))  # type: ignore[arg-type]
    await asyncio.wait((poller, asyncio.ensure_future(enough.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert not poller.done()
    poller.cancel()
    return reports[:count]


@pytest.mark.parametrize("fault", [EngineError("refused"), RuntimeError("a bug of ours"), None])
async def test_s60_a_reading_that_fails_or_hangs_is_reported_as_unknown_and_the_next_one_is_read(
    fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = Scripted(LOAD, fault, fault, LOAD)
    loads = [report.load for report in await reports_of(engine, 4)]
    assert loads == [LOAD, None, None, LOAD]
    assert len(caplog.records) == 1
    assert "engine e0" in caplog.text


async def test_a_hung_engine_is_asked_once_at_a_time() -> None:
    engine = Scripted()
    assert [report.load for report in await reports_of(engine, 3)] == [None] * 3
    assert not engine.overlapped


async def test_a_fault_of_the_receiver_is_not_swallowed() -> None:
    def post(_report: LoadReported) -> None:
        raise ValueError("the core refused")

    with pytest.raises(ValueError, match="the core refused"):
        await poll_load(Scripted(LOAD), post, interval_s=1.0)  # type: ignore[arg-type]
