"""Rollouts that one decision starts begin a few in each turn of the loop."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from paceline.domain import commands as do
from paceline.domain.ids import RolloutId
from paceline.domain.task import TaskRef
from paceline.runtime.starts import AT_ONCE, Starts
from paceline.testing import ScriptedEnv, one_call, run_driver, setup_for, train_env


def command(number: int) -> do.StartRollout:
    return do.StartRollout(RolloutId(number, 0), TaskRef("env", "train", number), 0, number, "e0", 0)


def goes_on() -> bool:
    """Whether the run is over: never."""
    return False


async def turns(starts: Starts, began: list[int], most: int = 50) -> list[int]:
    """How many have begun after each turn of the loop, until it is always the same."""
    seen = [len(began)]
    for _ in range(most):
        await asyncio.sleep(0)
        seen.append(len(began))
    return list(dict.fromkeys(seen))


async def test_so_many_begin_in_a_turn_of_the_loop_and_the_rest_in_the_next_ones_in_order() -> None:
    began: list[int] = []
    starts = Starts(lambda c: began.append(c.rollout.group), goes_on)
    starts.decide()
    count = 3 * AT_ONCE + 5
    for number in range(count):
        starts.add(command(number))
    assert await turns(starts, began) == [AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE, count]
    assert began == list(range(count))


async def test_a_decision_that_comes_meanwhile_does_not_overtake() -> None:
    began: list[int] = []
    starts = Starts(lambda c: began.append(c.rollout.group), goes_on)
    starts.decide()
    for number in range(AT_ONCE + 3):
        starts.add(command(number))
    starts.decide()
    starts.add(command(1000))
    assert began == list(range(AT_ONCE))
    await turns(starts, began)
    assert began == [*range(AT_ONCE + 3), 1000]
    starts.decide()
    starts.add(command(1001))
    assert began[-1] == 1001


async def test_one_that_is_to_be_told_something_hears_it_once_it_has_begun() -> None:
    said: list[tuple[str, int]] = []
    starts = Starts(lambda c: said.append(("begins", c.rollout.group)), goes_on)
    starts.decide()
    for number in range(AT_ONCE + 3):
        starts.add(command(number))
    for number in (AT_ONCE + 1, 0):
        starts.once_begun(RolloutId(number, 0), partial(said.append, ("hears", number)))
    assert said[AT_ONCE:] == [("hears", 0)]
    await turns(starts, [])
    assert said[AT_ONCE + 1 :] == [
        ("begins", AT_ONCE),
        ("begins", AT_ONCE + 1),
        ("hears", AT_ONCE + 1),
        ("begins", AT_ONCE + 2),
    ]


async def test_none_begins_once_the_run_is_over() -> None:
    began: list[int] = []
    over = False
    starts = Starts(lambda c: began.append(c.rollout.group), lambda: over)
    starts.decide()
    for number in range(2 * AT_ONCE):
        starts.add(command(number))
    over = True
    starts.add(command(1000))
    assert await turns(starts, began) == [AT_ONCE]


async def test_a_run_that_is_cancelled_with_hundreds_in_line_begins_none_of_them() -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    began: list[int] = []

    async def begin(number: int) -> None:
        began.append(number)
        await asyncio.sleep(3600)

    async def run() -> None:
        finish = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            starts = Starts(lambda c: tasks.create_task(begin(c.rollout.group)) and None, finish.done)
            starts.decide()
            for number in range(5 * AT_ONCE):
                starts.add(command(number))
            await finish

    running_task = asyncio.create_task(run())
    await asyncio.sleep(0)
    running_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_task
    await asyncio.sleep(0.01)
    assert not wrong
    assert len(began) < 2 * AT_ONCE


@pytest.mark.parametrize("stops", [False, True])
def test_hundreds_that_one_decision_starts_all_run_or_are_all_stopped(stops: bool) -> None:
    run = run_driver(
        setup_for(train_env(group_size=8), batch=320, max_steps=1, lag=0),
        {"env": ScriptedEnv(one_call)},
        cap=320,
        during=(lambda controls: controls.at(0.0, controls.shut_down)) if stops else None,
    )
    assert run.finish is not None
    assert run.finish.status == ("stopped" if stops else "done")
    assert len(run.rollouts) == len(run.commands(do.StartRollout)) == 320
    endings = {r.outcome.ending for r in run.rollouts}
    assert endings == ({"cancelled"} if stops else {"completed"})
