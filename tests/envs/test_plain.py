"""Plain functions of environments: in a thread, one at a time, unless they say otherwise; never in the loop's way."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from paceline.domain.rollout import Rollout
from paceline.domain.task import Split
from paceline.envs import (
    Context,
    EndlessTasks,
    Environment,
    ListTasks,
    Model,
    MultiTurnEnv,
    Observation,
    ProgramEnv,
    Result,
    SingleTurnEnv,
    ToolEnv,
    plain,
    weighed,
)
from paceline.envs.plain import THREAD_NAME, OwnThread, called, close_after_chores, off_loop
from paceline.envs.program import ProgramRun
from paceline.envs.protocol import task_data
from paceline.envs.threads import DaemonThreads
from paceline.envs.tool_env import Episode
from paceline.testing import play

RAN: list[tuple[str, threading.Thread]] = []
"""Which function ran where."""


def ran(name: str) -> None:
    RAN.append((name, threading.current_thread()))


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


class Single(SingleTurnEnv):
    def tasks(self, split: Split) -> EndlessTasks:
        return EndlessTasks(self.make, "made")

    def make(self, index: int) -> int:
        ran("make")
        return index

    def prompt(self, data: Any) -> str:
        ran("prompt")
        return "hi"

    def score(self, data: Any, text: str) -> float:
        ran("score")
        return 1.0


class Multi(MultiTurnEnv[int]):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1])

    def start(self, data: Any, ctx: Context) -> tuple[int, str]:
        ran("start")
        return 0, "begin"

    def step(self, state: int, text: str) -> Observation:
        ran("step")
        return Observation("on", done=state == 1, reward=1.0, state=state + 1)


class Tools(ToolEnv):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1])

    def prompt(self, data: Any) -> str:
        ran("prompt")
        return "hi"

    def state(self, data: Any, ctx: Context) -> list[int]:
        ran("state")
        return []

    def is_over(self, state: Any) -> bool:
        ran("is_over")
        return True

    def score(self, data: Any, state: Any, text: str) -> float:
        ran("score")
        return 1.0

    def release(self, state: Any) -> None:
        ran("release")

    def look(self) -> str:
        """Look."""
        return "seen"

    def __init__(self) -> None:
        self.tools = [self.look]


class Program(ProgramEnv):
    def __init__(self) -> None:
        super().__init__(tasks=[{"q": 1}])

    def command(self, data: Any, folder: Path) -> list[str]:
        ran("command")
        return ["true"]

    def prepare(self, data: Any, folder: Path) -> None:
        ran("prepare")

    def score(self, data: Any, run: ProgramRun) -> float:
        ran("score")
        return 1.0

    exit_code_matters = False


class Several(Single):
    async def score(self, data: Any, text: str) -> Result:
        def one(*_: Any) -> float:
            ran("scorer")
            return 1.0

        return await weighed({"one": (1.0, one)}, data, text)


LOOKS = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
KINDS: list[tuple[type[Environment], list[str], list[str]]] = [
    (Single, ["x"], ["make", "prompt", "score"]),
    (Multi, ["x", "y"], ["start", "step", "step"]),
    (Tools, [LOOKS], ["state", "prompt", "is_over", "score", "release"]),
    (Program, [], ["prepare", "command", "score"]),
]


def played(env: Environment, answers: list[str]) -> Rollout:
    return play(env, answers, serve=isinstance(env, ProgramEnv))


@pytest.mark.parametrize(("kind", "answers", "functions"), KINDS)
def test_what_says_nothing_runs_in_one_thread_of_its_own(
    kind: type[Environment], answers: list[str], functions: list[str]
) -> None:
    rollout = played(kind(), answers)
    if kind is Program:  # it asked the model nothing, which is no rollout; its functions ran all the same
        assert rollout.outcome.cause == "empty"
    else:
        assert (rollout.outcome.ending, rollout.outcome.cause) == ("completed", None)
    assert [name for name, _ in RAN] == functions
    (thread,) = {thread for _, thread in RAN}
    assert thread is not threading.main_thread()


@pytest.mark.parametrize(("kind", "answers", "functions"), KINDS)
@pytest.mark.parametrize("blocking", [True, False])
def test_what_blocks_runs_in_shared_threads_and_what_is_quick_on_the_loop(
    kind: type[Environment],
    answers: list[str],
    functions: list[str],
    blocking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind, "blocking", blocking)
    played(kind(), answers)
    assert [name for name, _ in RAN] == functions
    for _, thread in RAN:
        assert (thread is threading.main_thread()) is not blocking
        assert thread.name != THREAD_NAME


class Methods(Single):
    async def score(self, data: Any, text: str) -> Result:
        return await weighed({"one": (1.0, self.one)}, data, text)

    def one(self, data: Any, text: str) -> float:
        ran("scorer")
        return 1.0


@pytest.mark.parametrize(
    ("kind", "blocking", "is_on_the_loop"),
    [(Several, None, False), (Several, False, False), (Methods, None, False), (Methods, False, True)],
)
def test_scorers_run_in_threads_but_methods_where_their_environment_says(
    kind: type[Single], blocking: bool | None, is_on_the_loop: bool
) -> None:
    env = kind()
    env.blocking = blocking  # type: ignore[misc]
    assert play(env, ["x"]).reward == 1.0
    assert RAN[-1][0] == "scorer"
    assert (RAN[-1][1] is threading.main_thread()) is is_on_the_loop


def test_a_function_that_waits_for_the_loop_shows_that_the_loop_goes_on() -> None:
    async def main() -> None:
        go = threading.Event()
        asyncio.get_running_loop().call_later(0.02, go.set)
        assert await called(Single(), go.wait, 60.0)

    asyncio.run(main())


def test_calls_take_turns_in_order_and_those_that_block_run_side_by_side() -> None:
    env = Single()
    running: list[int] = []
    order: list[int] = []

    def turn(number: int) -> None:
        running.append(number)
        order.append(number)
        assert running == [number]
        running.remove(number)

    meet = threading.Barrier(8)

    class Blocking(Single):
        blocking = True

    async def main() -> None:
        await asyncio.gather(*(called(env, turn, number) for number in range(200)))
        await asyncio.gather(*(called(Blocking(), meet.wait, 60.0) for _ in range(8)))

    asyncio.run(main())
    assert order == list(range(200))


def test_what_one_call_opened_the_next_may_use() -> None:
    class Rows(Multi):
        def start(self, data: Any, ctx: Context) -> tuple[Any, str]:
            return sqlite3.connect(":memory:"), "begin"

        def step(self, state: Any, text: str) -> Observation:
            return Observation(done=True, reward=float(state.execute("select 7").fetchone()[0]))

    assert play(Rows(), ["x"]).reward == 7.0


def test_who_waits_behind_a_call_that_never_ends_goes_on_when_its_rollout_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain, "GIVE_UP_S", 0.01)

    async def main() -> None:
        env, go, begun = Single(), threading.Event(), threading.Event()

        def hangs() -> None:
            begun.set()
            go.wait()

        stuck = asyncio.create_task(called(env, hangs))
        await asyncio.sleep(0)
        behind = [asyncio.create_task(called(env, str, number)) for number in range(3)]
        unasked = asyncio.create_task(called(env, ran, "unasked"))
        assert await asyncio.to_thread(begun.wait, 60)
        unasked.cancel()
        await asyncio.wait([unasked])
        assert not any(task.done() for task in behind)
        stuck.cancel()
        assert await asyncio.wait_for(asyncio.gather(*behind), 60) == ["0", "1", "2"]
        assert RAN == []
        go.set()
        assert await env.chores.done(60.0) == 0

    asyncio.run(main())


def test_a_call_whose_rollout_has_gone_ends_in_its_turn_and_the_thread_stays() -> None:
    async def main() -> None:
        env, go, begun = Single(), threading.Event(), threading.Event()
        opened = await called(env, sqlite3.connect, ":memory:")
        running: list[str] = []

        def slow() -> None:
            running.append("slow")
            begun.set()
            assert go.wait(60)
            running.remove("slow")

        def uses() -> int:
            assert running == []
            return int(opened.execute("select 7").fetchone()[0])

        gone = asyncio.create_task(called(env, slow))
        assert await asyncio.to_thread(begun.wait, 60)
        gone.cancel()
        await asyncio.wait([gone])
        used = asyncio.create_task(called(env, uses))
        await asyncio.sleep(0)
        go.set()
        assert await used == 7
        await called(env, opened.close)

    asyncio.run(main())


def test_what_ended_rollouts_have_left_to_do_is_done_before_the_environment_is_closed() -> None:
    told: list[str] = []
    go, begun = threading.Event(), threading.Event()

    class Slow(Tools):
        def state(self, data: Any, ctx: Context) -> str:
            begun.set()
            assert go.wait(60)
            return "made"

        def release(self, state: Any) -> None:
            told.append(f"released {state}")

        async def close(self) -> None:
            told.append("closed")

    async def main() -> None:
        env = Slow()
        ctx: Any = Context(None, group_seed=0, noise_seed=0, deadline=9e9, clock=lambda: 0.0)  # type: ignore[arg-type]
        making = asyncio.create_task(called(env, env.state, None, ctx, unclaimed=env._release_in_vain))
        assert await asyncio.to_thread(begun.wait, 60)
        ending = [asyncio.create_task(env._release(Episode(n))) for n in range(3)]
        await asyncio.sleep(0)
        for task in (making, *ending):
            task.cancel()
        await asyncio.wait([making, *ending])
        assert told == []
        go.set()
        await close_after_chores(env, 60.0)

    asyncio.run(main())
    assert told == ["released 0", "released 1", "released 2", "released made", "closed"]


def test_an_environment_is_closed_although_a_release_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    class Slow(Tools):
        def release(self, state: Any) -> None:
            go.wait(60)

    async def main() -> None:
        env = Slow()
        ending = asyncio.create_task(env._release(Episode(1)))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        await close_after_chores(env, 0.01)
        go.set()
        await env.chores.done(60.0)

    asyncio.run(main())
    assert "Slow is closed with 1 calls of ended rollouts left" in caplog.text


def test_what_a_rollout_has_set_in_its_context_is_there_in_a_thread() -> None:
    mine: ContextVar[str] = ContextVar("mine")

    class Sets(Single):
        async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
            mine.set("set")
            return await super().rollout(task, model, ctx)

        def score(self, data: Any, text: str) -> float:
            return float(mine.get() == "set")

    assert play(Sets(), ["x"]).reward == 1.0


def test_a_source_that_reads_when_it_is_asked_does_so_in_a_thread_and_its_own_get_counts() -> None:
    class Lazy(Sequence[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: Any) -> Any:
            ran("read")
            return index

    class Mine(EndlessTasks):
        def get(self, index: int) -> Any:
            return "mine"

    async def main() -> None:
        env = Single()
        assert await task_data(env, ListTasks(Lazy(), "lazy"), 0) == 0
        assert await task_data(env, Mine(int, "mine"), 0) == "mine"
        assert await task_data(env, ListTasks([5]), 0) == 5

    asyncio.run(main())
    ((name, thread),) = RAN
    assert name == "read"
    assert thread is not threading.main_thread()


def test_the_thread_ends_with_its_environment() -> None:
    async def main() -> threading.Thread:
        found: threading.Thread = await called(Single(), threading.current_thread)
        return found

    thread = asyncio.run(main())
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("blocking", [None, True])
@pytest.mark.parametrize("raised", [StopIteration, GeneratorExit, KeyboardInterrupt])
def test_what_means_something_else_elsewhere_is_an_error_like_any_other(
    raised: type[BaseException], blocking: bool | None
) -> None:
    class Raises(Single):
        def score(self, data: Any, text: str) -> Any:
            raise raised

    env = Raises()
    env.blocking = blocking  # type: ignore[misc]
    rollout = play(env, ["x"])
    assert rollout.outcome.cause == "unscored"
    assert raised.__name__ in str(rollout.outcome.detail)


def test_shared_threads_that_hang_are_made_up_for_when_their_rollouts_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain, "GIVE_UP_S", 0.01)
    pool = DaemonThreads(2, "few")
    monkeypatch.setattr(plain, "shared_threads", lambda: pool)

    async def main() -> None:
        go, met = threading.Event(), threading.Barrier(3)

        def hangs() -> None:
            met.wait(60)
            go.wait(60)

        hanging = [asyncio.create_task(off_loop(hangs)) for _ in range(2)]
        await asyncio.to_thread(met.wait, 60)
        behind = asyncio.create_task(off_loop(int, "7"))
        await asyncio.sleep(0)
        for task in hanging:
            task.cancel()
        assert await asyncio.wait_for(behind, 60) == 7
        go.set()

    asyncio.run(main())


def _takes_a_signal() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.parametrize("bound", [_takes_a_signal, asyncio.get_running_loop])
def test_what_is_bound_to_the_main_thread_is_told_how_to_get_there(bound: Callable[[], Any]) -> None:
    class Bound(Single):
        def score(self, data: Any, text: str) -> float:
            bound()
            return 1.0

    env = Bound()
    rollout = play(env, ["x"])
    assert rollout.outcome.cause == "unscored"
    assert "set `blocking = False`" in str(rollout.outcome.detail)
    env.blocking = False  # type: ignore[misc]
    assert play(env, ["x"]).reward == 1.0


def test_a_plain_function_may_return_an_awaitable() -> None:
    class Later(Single):
        def score(self, data: Any, text: str) -> Any:
            async def later() -> float:
                ran("later")
                return 3.0

            return later()

    assert play(Later(), ["x"]).reward == 3.0
    assert RAN[-1] == ("later", threading.main_thread())


def test_a_thread_is_made_only_when_a_plain_function_is_called() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == THREAD_NAME}
    OwnThread()

    class Async(Environment):
        async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
            await model.chat("hi")
            return Result(1.0)

        def tasks(self, split: Split) -> ListTasks:
            return ListTasks([1])

    assert play(Async(), ["x"]).reward == 1.0
    assert {thread for thread in threading.enumerate() if thread.name == THREAD_NAME} <= before
