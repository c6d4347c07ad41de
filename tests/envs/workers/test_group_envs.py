"""Groups that run in one call, and episodes of several agents: each member keeps its own record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker_kit import TOKENIZER, Engine, Inside, inside

from paceline.config import Limits
from paceline.domain.ids import RolloutId
from paceline.domain.rollout import Outcome
from paceline.domain.task import Split, Task
from paceline.envs import GroupEnv, InfrastructureError, ListTasks, MultiAgentEnv, Result, ScoringError, Seat
from paceline.envs.surroundings import InRun
from paceline.errors import EngineError
from paceline.ports import GenerateReply, GenerateRequest


class Ranked(GroupEnv):
    """The longer answer wins; needs all answers."""

    def __init__(self) -> None:
        self.calls = 0

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["go"])

    async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Result]:
        self.calls += 1
        replies = await asyncio.gather(*(seat.model.chat(task.data + "!" * seat.member) for seat in seats))
        return [Result(float(seat.member), info={"others": len(replies)}) for seat in seats]


class Duel(MultiAgentEnv):
    """A solver and a critic take turns."""

    roles = ("solver", "critic")
    frozen = ("critic",)

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["go"])

    async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Mapping[str, Result]:
        answer = await seats["solver"].model.chat(task.data)
        verdict = await seats["critic"].model.chat(f"is {answer.text} right?")
        await seats["solver"].model.chat(verdict.text)
        return {"solver": Result(1.0), "critic": Result(10.0)}


async def of_group(env: GroupEnv, size: int, limits: Limits | None = None, seconds: float = 0.0) -> Inside:
    env.bind(InRun(size))
    return Inside(env, limits or Limits(), Engine(seconds=seconds))


async def test_a_group_runs_in_one_call_once_all_are_there_and_each_keeps_its_record() -> None:
    env = Ranked()
    run = await of_group(env, 3)
    pending = [asyncio.create_task(run.roll_out(m)) for m in range(2)]
    await asyncio.sleep(0.05)
    assert env.calls == 0
    ended = [await run.roll_out(2), *await asyncio.gather(*pending)]
    assert env.calls == 1
    assert sorted((r.id.member, r.reward, len(r.turns), r.info["others"]) for r in ended) == [
        (0, 0.0, 1, 3),
        (1, 1.0, 1, 3),
        (2, 2.0, 1, 3),
    ]
    assert len({r.turns[0].prompt_ids.tobytes() for r in ended}) == 3


async def test_a_member_that_is_cancelled_ends_the_call_for_all_and_nobody_waits() -> None:
    for started in (2, 3):
        env = Ranked()
        run = await of_group(env, 3, seconds=30.0)
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(started)]
        await asyncio.sleep(0.05)
        run.runner.cancel(RolloutId(0, 0), "stale")
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*pending)
        assert ended[0].outcome.ending == "cancelled"
        assert all(r.outcome.ending in ("cancelled", "failed") for r in ended)


async def test_members_that_come_after_one_was_cancelled_do_not_wait_for_it() -> None:
    env = Ranked()
    run = await of_group(env, 3)
    first = asyncio.create_task(run.roll_out(0))
    await asyncio.sleep(0.05)
    run.runner.cancel(RolloutId(0, 0), "stale")
    assert (await first).outcome.ending == "cancelled"
    async with asyncio.timeout(20):
        late = [await run.roll_out(1), await run.roll_out(2)]
    assert [r.outcome.ending for r in late] == ["failed"] * 2
    assert "cancelled before all were there" in late[0].outcome.detail
    assert env.calls == 0
    # The next group is none the worse for it.
    assert [r.reward for r in await asyncio.gather(*(run.roll_out(m, group=1) for m in range(3)))] == [
        0.0,
        1.0,
        2.0,
    ]


async def test_an_error_of_the_call_is_every_members() -> None:
    class Wrong(Ranked):
        async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Result]:
            await seats[0].model.chat("go")
            return [Result(1.0)]

    run = await of_group(Wrong(), 2)
    ended = await asyncio.gather(*(run.roll_out(m) for m in range(2)))
    assert {r.outcome.cause for r in ended} == {"environment"}
    assert "1 results for 2 seats" in ended[0].outcome.detail


class Refuses(Engine):
    """Fails the second member's call for good, and answers the others."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if "!" in TOKENIZER.decode(request.token_ids.tolist(), keep_special=True):
            raise EngineError("e0 answered 500")
        return await super().generate(request)


async def test_a_model_call_that_fails_a_shared_call_is_the_engines_failure_in_every_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Ranked()
    env.bind(InRun(2))
    inline = Inside(env, Limits(), Refuses())
    ended = await asyncio.gather(*(inline.roll_out(m) for m in range(2)))
    assert [r.outcome for r in ended] == [Outcome("failed", "engine", "e0 answered 500")] * 2

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    async with inside(tmp_path, "test_group_envs:Ranked", group_size=2, engine=Refuses()) as run:
        ended = await asyncio.gather(*(run.roll_out(m) for m in range(2)))
        assert [r.outcome for r in ended] == [Outcome("failed", "engine", "e0 answered 500")] * 2


class InTasks(Ranked):
    """Each seat in a task of its own, which makes an error of its own of a call that fails."""

    async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Result]:
        async with asyncio.TaskGroup() as group:
            for seat in seats:
                group.create_task(self.one(task, seat))
        return [Result(0.0) for _ in seats]

    async def one(self, task: Task, seat: Seat) -> None:
        try:
            await seat.model.chat(task.data + "!" * seat.member)
        except EngineError as error:
            raise RuntimeError("no answer") from error


class Without(InTasks):
    async def one(self, task: Task, seat: Seat) -> None:
        try:
            await seat.model.chat(task.data + "!" * seat.member)
        except EngineError:
            raise RuntimeError("no answer")  # noqa: B904


class Unscored(InTasks):
    async def one(self, task: Task, seat: Seat) -> None:
        try:
            await seat.model.chat(task.data + "!" * seat.member)
        except EngineError:
            raise ScoringError("no answer")  # noqa: B904


class AfterTasks(InTasks):
    async def rollout_group(self, task: Task, seats: Sequence[Seat]) -> Sequence[Result]:
        try:
            return await super().rollout_group(task, seats)
        except* RuntimeError:
            raise ValueError("no answers")  # noqa: B904


class AnotherMatter(InTasks):
    async def one(self, task: Task, seat: Seat) -> None:
        try:
            await seat.model.chat(task.data + "!" * seat.member)
        except EngineError:
            raise RuntimeError("no answer") from None


@pytest.mark.parametrize(
    ("env", "others"),
    [
        (InTasks, "engine"),
        (Without, "engine"),
        (Unscored, "engine"),
        (AfterTasks, "engine"),
        (AnotherMatter, "environment"),
    ],
)
async def test_what_is_made_of_a_failed_model_call_is_the_engines_failure_unless_it_is_said_to_be_another_matter(
    env: type[Ranked], others: str
) -> None:
    group = env()
    group.bind(InRun(2))
    inline = Inside(group, Limits(), Refuses())
    ended = await asyncio.gather(*(inline.roll_out(m) for m in range(2)))
    assert [r.outcome.cause for r in ended] == [others, "engine"]


async def test_a_worker_tells_of_whose_failure_an_error_without_from_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    async with inside(tmp_path, "test_group_envs:Without", group_size=2, engine=Refuses()) as run:
        ended = await asyncio.gather(*(run.roll_out(m) for m in range(2)))
        assert [r.outcome.cause for r in ended] == ["engine", "engine"]


async def test_s35_agents_of_an_episode_are_rollouts_with_a_role_and_a_frozen_one_does_not_train() -> None:
    run = await of_group(Duel(), 4)
    ended = sorted(await asyncio.gather(*(run.roll_out(m) for m in range(4))), key=lambda r: r.id)
    assert [(r.role, r.reward, len(r.turns), r.trains) for r in ended] == [
        ("solver", 1.0, 2, True),
        ("critic", 10.0, 1, False),
    ] * 2


async def test_an_episode_that_fails_costs_its_own_rollouts_and_a_seat_that_fails_its_own_alone() -> None:
    class Breaks(Duel):
        async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Any:
            played = await super().episode(task, seats)
            match seats["solver"].member:
                case 0:
                    raise ValueError("a bug in this episode")
                case 2:
                    return {**played, "critic": InfrastructureError("the critic's sandbox is gone")}
            return {**played, "critic": Result(None)}

    run = await of_group(Breaks(), 6)
    ended = sorted(await asyncio.gather(*(run.roll_out(m) for m in range(6))), key=lambda r: r.id)
    assert [(r.outcome.ending, r.outcome.cause) for r in ended] == [
        ("failed", "environment"),
        ("failed", "environment"),
        ("completed", None),
        ("failed", "infrastructure"),
        ("completed", None),
        ("completed", None),  # who is only played against needs no reward
    ]
    assert (ended[5].reward, ended[5].trains) == (None, False)


async def test_an_agent_whose_result_says_so_does_not_train_this_time() -> None:
    class Sits(Duel):
        frozen = ()

        async def episode(self, task: Task, seats: Mapping[str, Seat]) -> Mapping[str, Result]:
            played = dict(await super().episode(task, seats))
            played["critic"] = Result(10.0, trains=seats["critic"].member > 1)
            return played

    run = await of_group(Sits(), 4)
    ended = sorted(await asyncio.gather(*(run.roll_out(m) for m in range(4))), key=lambda r: r.id)
    assert [r.trains for r in ended] == [True, False, True, True]


async def test_a_group_that_cannot_be_dealt_is_refused() -> None:
    run = await of_group(Duel(), 3)
    ended = await asyncio.gather(*(run.roll_out(m) for m in range(3)))
    assert "multiple of 2" in ended[0].outcome.detail


async def test_a_group_meets_in_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Path(__file__).parent
    monkeypatch.syspath_prepend(str(where))
    async with inside(tmp_path, "test_group_envs:Ranked", group_size=3, count=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, group=g) for g in range(4) for m in range(3)))
        assert {r.outcome.ending for r in ended} == {"completed"}
        assert {r.info["others"] for r in ended} == {3}
    assert_has_no_leftovers(run)


def assert_has_no_leftovers(run: Any) -> None:
    assert run.pool._homes == {}
