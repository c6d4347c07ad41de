"""verifiers' environments in worker processes whose interpreter has it; and a few steps of training on them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_kit import interpreter, three_steps
from aiohttp import web
from worker_kit import TOKENIZER, Engine, Inside, inside

from paceline.errors import ConfigError
from paceline.ports import GenerateReply, GenerateRequest

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(900)]

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # where the workers look for the tasksets
START_S = 600.0  # half a gigabyte of packages to import, on a machine that may be busy


class Duels(Engine):
    """Answers 4 to a sum, and yes to a question about an answer."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        asked = TOKENIZER.decode(request.token_ids)
        return await Engine("yes" if "?" in asked else "4").generate(request)


class Converses(Engine):
    """A user who asks for a sum and is then content, and an assistant who says 4."""

    def __init__(self) -> None:
        super().__init__()
        self.user_turns = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        text = "4"
        if "role-playing a USER" in TOKENIZER.decode(request.token_ids):
            text = "1+3, please" if self.user_turns == 0 else "###DONE###"
            self.user_turns += 1
        return await Engine(text).generate(request)


@asynccontextmanager
async def playing(logs: Path, args: dict[str, Any], says: str | Engine, **more: Any) -> AsyncIterator[Inside]:
    python = interpreter("verifiers", "verifiers")
    section = {"id": "verifiers"}
    engine = Engine(says) if isinstance(says, str) else says
    options: dict[str, Any] = {"python": python, "engine": engine, "start_s": START_S, "hang_s": 300.0}
    async with inside(logs, "x", args, section=section, gateway={}, **options, **more) as run:
        yield run


async def test_an_episode_is_a_rollout_whose_reward_is_the_tasks(tmp_path: Path) -> None:
    env = {"taskset": {"id": "vf_sums", "most": 5}}
    async with playing(tmp_path, {"env": env, "held_out": 5}, "4") as run:
        assert run.environment.tasks("train").size == 20
        ended = await asyncio.gather(*(run.roll_out(0, group=n, index=n) for n in range(20)))
        assert {r.outcome.ending for r in ended} == {"completed"}, [r.outcome for r in ended]
        for rollout in ended:
            assert [turn.extends for turn in rollout.turns] == [False]
            right = eval(rollout.messages[0].content.removeprefix("Compute: ")) == 4
            assert rollout.rewards == {"exact": 2.0 * right, "digits": 0.25}
            assert rollout.reward == 2.0 * right + 0.25
            assert rollout.metrics["length"] == 1.0
        assert sum(r.rewards["exact"] for r in ended) > 0
        assert len({r.messages[0].content for r in ended}) == 20
        assert run.gate.granted == 20


async def test_an_exchange_goes_on_from_the_exact_ids_and_limits_cut_it_where_it_is(tmp_path: Path) -> None:
    args = {"env": {"taskset": {"id": "vf_guess"}}}
    async with playing(tmp_path, args, "8", limits={"max_turns": 2}) as run:
        assert run.environment.tasks("train").size is None
        found, cut = await asyncio.gather(*(run.roll_out(0, group=n, index=n) for n in (1, 2)))
        # Task 1 hides 8; task 2 hides 15, and the policy says 8 until it is stopped.
        assert (found.outcome.ending, found.reward, len(found.turns)) == ("completed", 1.0, 1)
        assert (cut.outcome.ending, cut.outcome.cause) == ("truncated", "turns")
        assert [turn.extends for turn in cut.turns] == [False, True]
        assert [m.content for m in cut.messages] == [
            "Guess: 1 to 15",
            "8",
            "higher",
            "8",
        ]
        assert cut.reward == 0.0


async def test_a_limit_of_the_agents_own_is_a_truncation_too(tmp_path: Path) -> None:
    env = {"taskset": {"id": "vf_guess"}, "player": {"max_turns": 1}}
    async with playing(tmp_path, {"env": env}, "8") as run:
        rollout = await run.roll_out(0, index=2)
        assert (rollout.outcome.ending, rollout.outcome.cause, rollout.reward) == ("truncated", "turns", 0.0)


async def test_s35_each_agent_that_plays_on_the_policy_is_a_rollout_of_its_own(tmp_path: Path) -> None:
    async with playing(tmp_path, {"env": "vf_duel"}, Duels()) as run:
        assert (run.environment.whole_group, run.environment.roles) == (True, ("solver", "critic"))  # type: ignore[attr-defined]
        wrong = await asyncio.gather(*(run.roll_out(m, group=0, index=0) for m in range(4)))
        right = await asyncio.gather(*(run.roll_out(m, group=2, index=2) for m in range(4)))
    for ended, task, rewards in ((wrong, "Compute: 1+1", (0.0, 0.0)), (right, "Compute: 1+3", (1.0, 10.0))):
        asked = ((task, "4"), (f"{task} is 4?", "yes"))
        for rollout in ended:
            which = ("solver", "critic").index(rollout.role)
            assert (rollout.outcome.ending, rollout.trains) == ("completed", True), rollout.outcome
            assert rollout.reward == rewards[which]
            assert tuple(message.content for message in rollout.messages) == asked[which]
            assert [turn.extends for turn in rollout.turns] == [False]
        assert sorted(rollout.role for rollout in ended) == ["critic", "critic", "solver", "solver"]


async def test_an_agent_that_the_environment_does_not_let_learn_is_played_against(tmp_path: Path) -> None:
    env = {"taskset": {"id": "vf_sums", "most": 5}, "id": "user-sim"}
    async with playing(tmp_path, {"env": env, "held_out": 5}, Converses(), group_size=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, index=2) for m in range(2)))
    assistant, user = sorted(ended, key=lambda rollout: rollout.role)
    assert [r.outcome.ending for r in (assistant, user)] == ["completed"] * 2, [r.outcome for r in ended]
    assert (assistant.role, assistant.trains, assistant.reward) == ("assistant", True, 2.25)
    assert (user.role, user.trains, user.reward) == ("user", False, None)
    assert [message.content for message in assistant.messages] == ["1+3, please", "4"]
    assert [turn.extends for turn in user.turns] == [False, True]


async def test_those_that_the_run_does_not_name_are_played_against_as_often_as_the_episode_wants(
    tmp_path: Path,
) -> None:
    args = {"env": {"taskset": {"id": "vf_duel"}, "verdicts": 2}, "trains": "solver"}
    async with playing(tmp_path, args, Duels(), group_size=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, index=2) for m in range(2)))
    critic, solver = sorted(ended, key=lambda rollout: rollout.role)
    assert (solver.trains, solver.reward, len(solver.turns)) == (True, 1.0, 1)
    assert (critic.trains, critic.reward, len(critic.turns)) == (False, 10.0, 2)


async def test_an_agent_that_fails_costs_its_own_rollout_where_the_environment_goes_on(
    tmp_path: Path,
) -> None:
    args = {"env": {"taskset": {"id": "vf_duel"}, "broken": True}}
    async with playing(tmp_path, args, Duels(), group_size=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, index=2) for m in range(2)))
    by_reward = sorted(ended, key=lambda rollout: rollout.reward is None)
    assert (by_reward[0].role, by_reward[0].reward) == ("solver", 1.0)
    assert (by_reward[1].outcome.ending, by_reward[1].outcome.cause) == ("failed", "environment")
    assert "no judge today" in by_reward[1].outcome.detail


async def test_an_agent_that_learns_plays_once_in_an_episode(tmp_path: Path) -> None:
    args = {"env": {"taskset": {"id": "vf_duel"}, "verdicts": 2}}
    async with playing(tmp_path, args, Duels(), group_size=2) as run:
        ended = await asyncio.gather(*(run.roll_out(m, index=2) for m in range(2)))
    failed = [rollout for rollout in ended if rollout.outcome.ending == "failed"]
    assert len(failed) == 1
    assert "ran agent 'critic' 2 times" in failed[0].outcome.detail


async def test_an_agent_with_a_client_plays_on_that_and_is_no_rollout(tmp_path: Path) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"][-1]["content"])
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "a", "object": "chat.completion", "created": 0, "model": "judge"}
        return web.json_response({**reply, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = {"type": "eval", "base_url": url, "api_key_var": "PACELINE_NO_API_KEY"}
    args = {"env": {"taskset": {"id": "vf_duel"}, "critic": {"client": client, "model": "judge"}}}
    try:
        async with playing(tmp_path, args, Duels()) as run:
            assert not run.environment.whole_group
            ended = await run.roll_out(index=2)
    finally:
        await runner.cleanup()
    assert (ended.outcome.ending, ended.reward, ended.role) == ("completed", 1.0, "")
    assert (asked, run.gate.granted) == (["Compute: 1+3 is 4?"], 1)


DUEL = {"taskset": {"id": "vf_duel"}}
ELSEWHERE = {"client": {"type": "eval", "base_url": "http://127.0.0.1:1/v1"}}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"env": "vf_nowhere"}, "vf_nowhere"),
        ({"env": {"taskset": {"id": "vf_sums", "mots": 5}}}, "mots"),
        ({"env": DUEL, "trains": ["judge"]}, "'judge', which is none of its agents .solver, critic."),
        ({"env": DUEL, "trains": []}, "args.trains is empty"),
        ({"env": {**DUEL, "critic": ELSEWHERE}, "trains": "critic"}, "args.env.critic.client"),
        ({"env": {**DUEL, "critic": ELSEWHERE, "solver": ELSEWHERE}}, "the policy plays none"),
        ({"env": {**DUEL, "solver": {"retries": {"max_retries": 1}}}}, "args.env.solver.retries"),
        ({"env": {**DUEL, "retries": {"max_retries": 1}}}, "args.env.retries"),
        ({"env": DUEL, "eval": {"critic": ELSEWHERE}}, "args.eval has solver play on the policy"),
    ],
)
async def test_what_cannot_be_played_is_named(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with playing(tmp_path, args, ""):
            pass


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.parametrize("taskset", ["vf_sums", "vf_guess", "vf_duel"])
def test_three_steps_are_trained_on_it(tmp_path: Path, taskset: str) -> None:
    from paceline import run
    from paceline.journal import read_rollouts

    python = interpreter("verifiers", "verifiers")
    section = {
        "id": "verifiers",
        "args": {"env": taskset},
        "group_size": 4,
        "limits": {"max_context": 500},
        "workers": {"type": "process", "python": python, "start_s": START_S, "hang_s": 300},
    }
    summary = run(three_steps(tmp_path, section))
    assert (summary["status"], summary["steps"]) == ("done", 3), summary
    trained = [r for r in read_rollouts(tmp_path / "t") if r.reward is not None]
    assert len(trained) >= 24
    assert {r.role for r in trained} == ({"solver", "critic"} if taskset == "vf_duel" else {""})
    assert all(turn.extends for r in trained for turn in r.turns[1:])
    for rollout in trained:
        for turn in rollout.turns:
            assert len(turn.sampled_ids) == len(turn.logprobs) == sum(n for _, n in turn.versions)
