"""What cannot be written for want of room: the run is held, tells why, goes on, or ends in finite time."""

from __future__ import annotations

import errno
from asyncio import sleep
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.core.waits import waits
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.batch import PackedBatch
from paceline.ports import Shipment
from paceline.runtime.room import NoRoom, Room
from paceline.testing import (
    Controls,
    DriverRun,
    Script,
    ScriptedEnv,
    ScriptedTrainer,
    World,
    run_driver,
    setup_for,
)
from paceline.testing.loop import run_virtual
from paceline.testing.script import alternating

FULL = OSError(errno.ENOSPC, "No space left on device")


class Told:
    """A room, and what it said."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.posted: list[str] = []
        self.said: list[str] = []
        self.failed: list[NoRoom] = []
        self.room = Room(
            post=lambda event: self.posted.append(event.why),
            tell=self.said.append,
            fail=self.failed.append,
            limit_s=limit_s,
        )


def failing(times: int, error: OSError = FULL) -> Callable[[], Awaitable[str]]:
    left = [error] * times

    async def attempt() -> str:
        if left:
            raise left.pop()
        return "written"

    return attempt


def test_it_is_tried_again_until_there_is_room() -> None:
    async def main() -> None:
        told = Told()
        assert await told.room.insist("batch 3", failing(20)) == "written"
        assert told.posted == ["batch 3: [Errno 28] No space left on device", ""]
        assert "held: batch 3" in told.said[0]
        assert "goes on" in told.said[1]
        with pytest.raises(OSError, match="Input/output"):
            await told.room.insist("batch 4", failing(1, OSError(errno.EIO, "Input/output error")))
        assert not told.failed
        told.room.close()

    run_virtual(main())


def test_patience_ends_for_whoever_waits_longest_and_not_for_what_is_only_slow() -> None:
    async def main() -> None:
        told = Told(limit_s=60.0)
        told.room.missing("the backlog", "9 MB wait")
        for _ in range(10):
            await sleep(30.0)
            told.room.missing("the backlog", "8 MB wait")
        assert not told.failed
        told.room.missing("the journal", "No space left on device")
        await sleep(45.0)
        told.room.missing("the backlog", "7 MB wait")
        await sleep(20.0)
        (error,) = told.failed
        assert str(error).startswith("the journal could not be written for 60 s: No space left on device")
        assert told.room.held == "the backlog: 7 MB wait; the journal: No space left on device"

    run_virtual(main())


class Full(ScriptedTrainer):
    """Its disk has no room for a batch for a while."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    async def ship(self, packed: PackedBatch) -> Shipment:
        if self._left:
            self._left -= 1
            raise FULL
        return await super().ship(packed)


def held_run(times: int, *, hold: Callable[[Controls], Any] | None = None) -> DriverRun:
    """A run on a disk that refuses a batch so many times."""
    return run_driver(
        setup_for(seq_len=512),
        {"env": ScriptedEnv()},
        trainer=lambda: Full(times),
        during=hold,
        room=True,
    )


def between(run: DriverRun) -> tuple[float, float]:
    """When the run was held, and when it went on."""
    (since, until) = [at for at, event, _ in run.journal.entries if isinstance(event, on.RunHeld)]
    return since, until


def test_while_a_batch_has_no_room_nothing_starts_and_no_call_begins_and_then_it_goes_on() -> None:
    run = held_run(30)
    assert run.finish is not None
    assert run.finish.status == "done"
    since, until = between(run)
    assert until - since >= 29.0
    begun = [at for kind in (do.StartRollout, do.GrantTurn) for at, _ in run.commands(kind)]
    assert not [at for at in begun if since < at < until]
    assert [at for at in begun if at >= until], "it would have ended anyway"
    assert [packed.batch.step for packed in run.trainer.batches] == [1, 2, 3, 4]


def test_without_room_for_too_long_a_run_ends_with_the_cause() -> None:
    with pytest.raises(NoRoom, match=r"batch 1 could not be written for 600 s: \[Errno 28\] No space left"):
        held_run(10_000)


def test_a_run_that_is_held_can_be_stopped() -> None:
    def hold(controls: Controls) -> None:
        controls.at(0.5, lambda: controls.post(on.RunHeld("a slow disk")))
        controls.at(40.0, controls.shut_down)

    run = held_run(0, hold=hold)
    assert run.finish is not None
    assert run.finish.status == "stopped"
    launched = {c.rollout for _, c in run.commands(do.StartRollout)}
    assert sorted(r.id for r in run.rollouts) == sorted(launched)


def test_what_stands_still_because_it_is_held_says_so() -> None:
    world = World(setup_for(max_steps=9), Script(reward=alternating, ship_s=1e12), cap=3)
    world.run(until=1000.0)
    world.core.handle(on.RunHeld("the journal: No space left on device"), 1000.0)
    assert waits(world.core)[0].told(1000.0) == (
        "everything waits for room to write (the journal: No space left on device)"
    )
