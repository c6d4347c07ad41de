"""A run in which nothing happens says what it waits for; one that waits for nothing ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.core.curriculum import Curriculum, Source
from paceline.core.waits import progress, waits
from paceline.errors import InvariantError
from paceline.runtime.quiet import QuietWatch
from paceline.testing import Plan, Script, World, setup_for
from paceline.testing.loop import run_virtual
from paceline.testing.script import alternating

NEVER = 1e12


def stuck(script: Script, until: float = 1000.0) -> World:
    world = World(setup_for(max_steps=9), script, cap=3)
    world.run(until=until)
    return world


def watched(world: World, seconds: float) -> list[tuple[float, str]]:
    """What is told, and when, in so many seconds after the world stopped."""
    told: list[tuple[float, str]] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time() - world.now

        def clock() -> float:
            return loop.time() - began

        quiet = QuietWatch(world.core, lambda text: told.append((clock() - world.now, text)), clock, 60.0)
        try:
            async with asyncio.timeout(seconds):
                await quiet.run()
        except TimeoutError:
            pass

    run_virtual(watch())
    return told


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (Script(seconds=lambda _r, _t: NEVER), "waits for engine 'e0' to answer, for "),
        (Script(plan=lambda _r, _t: Plan(((NEVER, 1.0),))), "waits for its environment, for "),
        (Script(reward=alternating, train_s=lambda _s: NEVER), "step 1 waits for the trainer"),
        (
            Script(reward=alternating, load_s=lambda _e, _v: NEVER),
            "v1 waits for engine 'e0' to load it",
        ),
        (Script(reward=alternating, process_s=lambda _g: NEVER), "group 0 waits to be processed"),
        (Script(reward=alternating, ship_s=NEVER), "batch 1 waits to be shipped"),
    ],
)
def test_what_waits_is_named_with_what_it_waits_for(script: Script, text: str) -> None:
    world = stuck(script)
    told = watched(world, 500.0)
    assert [round(at) for at, _ in told] == [60, 120, 240, 480]
    assert all(text in line for _, line in told), told
    assert told[0][1].startswith("nothing has happened for 60 s: ")


def test_the_oldest_of_each_kind_is_told_with_the_number_of_the_others() -> None:
    world = stuck(Script(plan=lambda r, _t: Plan(((NEVER if r.member else 0.0, NEVER),))), until=50.0)
    first, second = waits(world.core)
    assert (first.since, first.others + second.others) == (0.0, 1)
    assert {first.what.split(" waits for ")[1], second.what.split(" waits for ")[1]} == {
        "its environment",
        "engine 'e0' to answer",
    }
    assert first.told(50.0).endswith(("for 50 s", "(and 1 more)"))


def test_an_engine_that_loads_holds_its_gate() -> None:
    slow: Callable[[str, int], float] = lambda _e, _v: NEVER  # noqa: E731
    script = Script(
        plan=lambda r, _t: Plan(((2.0 * r.member, 1.0),) * 2, reward=float(r.member)), load_s=slow
    )
    told = "; ".join(wait.told(1000.0) for wait in waits(stuck(script).core))
    assert "waits for engine 'e0' to load v1" in told


def test_a_run_that_goes_on_is_left_alone() -> None:
    world = World(setup_for(max_steps=4), Script(reward=alternating), cap=3)
    before = progress(world.core)
    world.run()
    assert progress(world.core) != before
    assert watched(world, 500.0) == []  # it has finished


def test_a_run_that_waits_for_nothing_ends() -> None:
    world = World(setup_for(max_steps=9), Script(reward=alternating), cap=3, engines=0)

    class Nothing(Curriculum):  # a bug: there are tasks, and none is ever drawn
        def draw(self, may: object) -> None:
            return None

    world.core.launcher.curriculum = Nothing([Source("env", 8)], 0)
    world.join("e0", 0)
    world.run(until=10.0)
    with pytest.raises(InvariantError, match=r"stands still: nothing has happened for .* 3 permits are free"):
        watched(world, 500.0)
