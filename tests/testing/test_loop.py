"""Virtual time: hours in no time, deadlocks told, threads waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.testing import run_virtual


def test_an_hour_takes_no_time_and_the_clock_says_an_hour() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_virtual(main()) == 3600.0
    assert time.perf_counter() - began < 5.0


def test_timers_fire_in_order_whatever_their_number() -> None:
    async def main() -> list[int]:
        fired: list[int] = []

        async def one(seconds: int) -> None:
            await asyncio.sleep(seconds)
            fired.append(seconds)

        await asyncio.gather(*map(one, (30, 10, 20)))
        return fired

    assert run_virtual(main()) == [10, 20, 30]


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        late = loop.call_later(100, lambda: None)
        answer = await loop.run_in_executor(None, sum, range(10))
        late.cancel()
        return answer, loop.time()

    assert run_virtual(main()) == (45, 0.0)
