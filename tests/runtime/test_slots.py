"""An engine's place in a run: whoever holds it need not know that the engine in it was replaced."""

from __future__ import annotations

import asyncio

from paceline.errors import EngineError
from paceline.ports import Engine
from paceline.runtime.slots import EngineSlot
from paceline.testing import ScriptedEngine, run_virtual


def test_an_engine_that_is_back_takes_the_place_of_the_old_one_and_the_old_one_is_closed() -> None:
    async def main() -> None:
        first, second = ScriptedEngine("e0"), ScriptedEngine("e0")
        refusals = iter([EngineError("still down"), EngineError("still down")])

        async def renew() -> tuple[Engine, int]:
            for refusal in refusals:
                raise refusal
            return second, 3

        slot = EngineSlot(first, renew)
        joined = await slot.revive()
        assert (joined.info.id, joined.version) == ("e0", 3)
        assert slot.engine is second
        # At once, after 0.5 s, after 1 s.
        assert asyncio.get_running_loop().time() == 1.5

    run_virtual(main())


def test_an_engine_that_is_lost_again_at_once_is_asked_ever_more_rarely() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = ScriptedEngine("e0")

        async def renew() -> tuple[Engine, int]:
            return engine, 0

        slot = EngineSlot(engine, renew)
        times = []
        for _ in range(4):
            await slot.revive()
            times.append(loop.time())
        assert times == [0.0, 0.5, 1.5, 3.5]
        await asyncio.sleep(100)
        before = loop.time()
        await slot.revive()
        assert loop.time() == before

    run_virtual(main())
