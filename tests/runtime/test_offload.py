"""What anybody's algorithm raises comes back to whoever asked, and to nobody else."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import said_by
from paceline.runtime.offload import Offload, Slices, Threads


@pytest.mark.parametrize("place", [Slices, Threads])
@pytest.mark.parametrize(
    "error", [StopIteration(3), asyncio.CancelledError(), SystemExit(4), ValueError("wrong"), GeneratorExit()]
)
async def test_whatever_is_raised_is_an_error_of_that_call_alone(
    place: type[Slices] | type[Threads], error: BaseException
) -> None:
    def raises() -> None:
        raise error

    offload: Offload = place()
    try:
        async with asyncio.timeout(10):
            with pytest.raises((RuntimeError, ValueError), match=str(error) or type(error).__name__):
                await offload.run(raises)
            assert await offload.run(lambda: 5) == 5, "the next one is served"
    finally:
        offload.close()


async def test_slices_go_on_behind_work_that_raises_although_it_should_not() -> None:
    told: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
    slices, done = Slices(), asyncio.Event()

    def raises() -> None:
        raise ValueError("wrong")

    slices.add(raises)
    slices.add(done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert [str(error) for error in told] == ["wrong"]


def test_an_error_without_a_text_is_told_all_the_same() -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert said_by(Speechless()) == "Speechless (its text raises RuntimeError)"
    assert said_by(ValueError("wrong")) == "ValueError: wrong"
