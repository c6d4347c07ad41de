"""Events are handled at once where that holds nobody up, and in order always."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from paceline.domain.events import Event, TimerFired
from paceline.envs.protocol import Context, Environment, Result
from paceline.runtime import inbox as inboxes
from paceline.runtime.inbox import SHARE, Inbox
from paceline.testing import ScriptedEnv, run_driver, setup_for

SLICE_S = 0.002


class Clock:
    """Time that passes only while events are handled."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Handler:
    """Takes `cost_s` over each event, by its clock."""

    def __init__(self, cost_s: float = 0.0, clock: Clock | None = None) -> None:
        self.cost_s = cost_s
        self.clock = clock or Clock()
        self.handled: list[Event] = []

    def handle(self, event: Event) -> None:
        self.handled.append(event)
        self.clock.now += self.cost_s


async def test_an_event_that_finds_the_inbox_empty_is_handled_inside_post() -> None:
    inbox = Inbox()
    handler = Handler()
    inbox.on_event(handler.handle, SLICE_S)
    inbox.post(TimerFired())
    assert len(handler.handled) == 1


async def test_what_is_posted_while_an_event_is_handled_comes_after_it() -> None:
    inbox = Inbox()
    first, second = TimerFired(), TimerFired()
    order: list[str] = []

    def handle(event: Event) -> None:
        if event is first:
            order.append("first begins")
            inbox.post(second)
            order.append("first ends")
        else:
            order.append("second")

    inbox.on_event(handle, SLICE_S)
    inbox.post(first)
    assert order == ["first begins", "first ends", "second"]


async def test_what_was_posted_before_anyone_listened_is_handled_soon() -> None:
    inbox = Inbox()
    inbox.post(TimerFired())
    handler = Handler()
    inbox.on_event(handler.handle, SLICE_S)
    inbox.post(TimerFired())
    assert not handler.handled  # in order: behind what waits already
    await asyncio.sleep(0)
    assert len(handler.handled) == 2


async def test_a_burst_leaves_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(inboxes, "perf_counter", clock)
    inbox = Inbox()
    handler = Handler(0.0002, clock)
    inbox.on_event(handler.handle, SLICE_S)
    for _ in range(100):  # 20 ms of work, offered by one callback
        inbox.post(TimerFired())
    at_once = len(handler.handled)
    most = SLICE_S / 2 / (1 / SHARE - 1) / handler.cost_s + 1
    assert 1 <= at_once <= most < 100
    turns = 0
    while len(handler.handled) < 100:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 4  # slices of 2 ms


def test_what_an_environment_sets_in_its_context_does_not_reach_the_rollouts_that_follow() -> None:
    mark: ContextVar[str] = ContextVar("mark", default="")
    found: list[str] = []

    class Marks(ScriptedEnv):
        async def rollout(self, task, model, ctx: Context) -> Result:  # type: ignore[no-untyped-def]
            found.append(mark.get())
            mark.set("left by another rollout")
            return await super().rollout(task, model, ctx)

    env: Environment = Marks()
    run_driver(setup_for(max_steps=3, seq_len=512), {"env": env}, max_seconds=600)
    assert len(found) > 8
    assert set(found) == {""}
