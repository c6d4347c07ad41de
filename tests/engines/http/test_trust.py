"""What becomes of calls in flight when new weights turn out not to be what they should be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_server import COMPLETIONS, FakeServer, Say
from test_conformance import KINDS, Kind, ask, both, kind
from test_http_generate import until
from test_router import a_fleet

from paceline.errors import EngineError
from paceline.ports import Engine

__all__ = ["kind"]  # the fixture

STAMPED = ((0, 1),)
"""Of two tokens that an aborted call had, the one before the new weights; of four that ended by themselves, two."""


class Check:
    """Finds out nothing: does what it is told, and then agrees or not."""

    def __init__(self, meanwhile: Callable[[], Awaitable[Any]], agrees: bool) -> None:
        self._meanwhile, self._agrees = meanwhile, agrees

    async def before(self, path: str) -> None:
        pass

    async def after(self, engine: Engine, version: int, path: str) -> None:
        await self._meanwhile()
        if not self._agrees:
            raise EngineError(f"does not serve v{version}")


async def nothing() -> None:
    pass


async def test_calls_in_flight_are_stopped_before_a_server_works_again_whose_load_failed(kind: Kind) -> None:
    async with both(kind) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        fake.say(kind.load, *[Say(status=500, body={"error": {"message": "half of it is in"}})] * 3)
        with pytest.raises(EngineError, match="half of it is in"):
            await engine.update_weights(1, "/weights/v1")
        reply = await running
        assert (reply.finish, reply.versions) == ("abort", ((0, 2),)), (
            "what it had when the server was paused"
        )
        order = fake.paths(kind.pause, kind.load, kind.abort, kind.resume)
        assert order[-2:] == [kind.abort, kind.resume]
        assert order.index(kind.load) < order.index(kind.abort)


async def test_what_weights_sampled_that_the_probe_tells_from_the_trainers_is_cut_off(kind: Kind) -> None:
    async with both(kind, check=Check(nothing, agrees=False)) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        with pytest.raises(EngineError, match="does not serve v1"):
            await engine.update_weights(1, "/weights/v1")
        reply = await running
        assert fake.label == "v1"
        assert reply.finish == "abort"
        # A server that does not stamp its tokens cannot say which are which.
        assert reply.versions == (() if kind.route == COMPLETIONS else STAMPED)
        assert len(reply.token_ids) == len(reply.logprobs) == sum(n for _, n in reply.versions)


@pytest.mark.parametrize("agrees", [True, False])
async def test_a_call_that_ends_while_the_probe_is_under_way_waits_for_its_word(
    kind: Kind, agrees: bool
) -> None:
    async def ends() -> None:
        fake.hold.set()
        await until(lambda: not engine.in_flight)
        assert not running.done()

    async with both(kind, check=Check(ends, agrees)) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        if agrees:
            await engine.update_weights(1, "/weights/v1")
        else:
            with pytest.raises(EngineError, match="does not serve v1"):
                await engine.update_weights(1, "/weights/v1")
        reply = await running
        stamps = kind.route != COMPLETIONS
        if agrees:
            assert (reply.finish, reply.versions) == ("length", ((0, 2), (1, 2)) if stamps else ((0, 4),))
        else:
            assert (reply.finish, reply.versions) == ("abort", ((0, 2),) if stamps else ())


async def test_a_call_that_ended_under_the_old_weights_does_not_wait() -> None:
    async def ends() -> None:
        await engine.abort("r1")
        async with asyncio.timeout(5):
            assert (await running).versions == ((0, 2),)

    kind = KINDS["vllm"]
    async with both(kind, check=Check(ends, agrees=True)) as (fake, engine):
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(ask()))
        await until(lambda: bool(fake.running))
        # It does not say that its weights are new, so all it samples counts as of the old.
        fake.say("/finish_weight_update", Say(body={}))
        fake.say("/weight_info", Say(body={"weight_version": "v1"}))
        await engine.update_weights(1, "/weights/v1")


async def test_behind_a_router_the_calls_on_a_server_that_failed_are_stopped_before_it_works_again() -> None:
    async with a_fleet() as (engine, servers):
        for server in servers:
            server.hold = asyncio.Event()
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{n}", session=f"g{n}"))) for n in range(2)]
        await until(lambda: sum(len(server.running) for server in servers) == 2)
        bad: FakeServer = next(server for server in servers if server.running)
        bad.say("/update_weights", Say(status=400, body={"error": {"message": "half of it is in"}}))
        with pytest.raises(EngineError, match="half of it is in"):
            await engine.update_weights(1, "/weights/v1")
        for reply in await asyncio.gather(*calls):
            assert reply.finish == "abort"
            assert {version for version, _ in reply.versions} == {0}
        order = bad.paths("/update_weights", "/abort_requests", "/resume")
        assert order[-1] == "/resume"
        assert "/abort_requests" in order[order.index("/update_weights") : -1]
