"""What becomes of calls in flight when new weights turn out not to be what they should be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import COMPLETIONS, GENERATE, FakeServer, Say
from test_conformance import KINDS, Kind, ask, both, kind
from test_http_generate import until
from test_router import a_fleet

from paceline.domain.probe import Probe
from paceline.errors import EngineError
from paceline.ports import Samples
from paceline.runtime.weight_check import ProbeCheck

__all__ = ["kind"]  # the fixture

STAMPED = ((0, 1),)
"""Of two tokens that an aborted call had, the one before the new weights; of four that ended by themselves, two."""


class Check:
    """Finds out nothing: does what it is told, and then agrees or not."""

    def __init__(self, meanwhile: Callable[[], Awaitable[Any]], agrees: bool) -> None:
        self._meanwhile, self._agrees = meanwhile, agrees

    async def before(self, path: str) -> None:
        pass

    async def after(self, engine: Samples, version: int, path: str) -> None:
        self.engine = engine
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


@pytest.mark.parametrize("have_ended", [True, False])
async def test_a_probe_waits_for_no_call_that_waits_for_its_word_nor_for_a_long_one(
    kind: Kind, have_ended: bool
) -> None:
    async def probe() -> None:
        if have_ended:
            fake.hold.set()
            await until(lambda: not engine.in_flight)
        async with asyncio.timeout(2):
            assert (await check.engine.generate(ask("probe-1", tokens=1))).token_ids.size == 1
        assert not any(call.done() for call in calls)

    check = Check(probe, agrees=True)
    async with both(kind, max_connections=2, check=check) as (fake, engine):
        fake.hold = asyncio.Event()
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{n}"))) for n in range(3)]
        await until(lambda: len(fake.running) == 2)  # one more waits for a place
        await engine.update_weights(1, "/weights/v1")
        fake.hold.set()
        assert {reply.finish for reply in await asyncio.gather(*calls)} == {"length"}


async def test_the_check_of_a_run_is_answered_while_calls_in_flight_hold_every_place(
    kind: Kind, tmp_path: Path
) -> None:
    async with both(
        kind, max_connections=2, check=ProbeCheck(100.0, lambda _path: [Probe((5, 6), ((100, -1.0),))] * 20)
    ) as (fake, engine):
        (tmp_path / "model.safetensors").touch()
        fake.hold = asyncio.Event()
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{n}"))) for n in range(2)]
        await until(lambda: len(fake.running) == 2)
        async with asyncio.timeout(2):
            await engine.update_weights(1, str(tmp_path))
        assert fake.peak <= 2 + 8, "probes are bounded, too"
        fake.hold.set()
        await asyncio.gather(*calls)


async def test_a_call_that_got_its_place_while_weights_came_in_waits_for_the_word_too(kind: Kind) -> None:
    async def ends() -> None:
        fake.hold.set()
        await until(lambda: not engine.in_flight and len(fake.paths(kind.route)) == 2)
        await asyncio.sleep(0.05)
        assert not late.done()

    async with both(kind, max_connections=1, check=Check(ends, agrees=False)) as (fake, engine):
        fake.hold = asyncio.Event()
        first = asyncio.ensure_future(engine.generate(ask("first")))
        await until(lambda: bool(fake.running))
        late = asyncio.ensure_future(engine.generate(ask("late")))
        with pytest.raises(EngineError, match="does not serve v1"):
            await engine.update_weights(1, "/weights/v1")
        assert ((await late).finish, (await late).versions) == ("abort", ())
        await first


async def test_behind_a_router_a_reply_that_waits_for_the_word_leaves_its_place_to_others() -> None:
    async with a_fleet(max_connections=1, check=Check(nothing, agrees=True)) as (engine, servers):
        gate = asyncio.Event()
        for server in servers:
            server.hold = asyncio.Event()
            server.say("/resume", Say(until=gate))
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{n}", session=f"g{n}"))) for n in range(2)]
        await until(lambda: sum(len(server.running) for server in servers) == 1)
        update = asyncio.ensure_future(engine.update_weights(1, "/weights/v1"))
        await until(lambda: all(server.paths("/resume") for server in servers))
        for server in servers:
            server.hold.set()
        await until(lambda: sum(len(server.paths(GENERATE)) for server in servers) == 2)
        assert not any(call.done() for call in calls)
        gate.set()
        await update
        assert {reply.finish for reply in await asyncio.gather(*calls)} == {"length"}


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
