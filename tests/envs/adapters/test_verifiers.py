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
from worker_kit import Engine, Inside, inside

from paceline.errors import ConfigError

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(900)]

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # where the workers look for the tasksets
START_S = 600.0  # half a gigabyte of packages to import, on a machine that may be busy


@asynccontextmanager
async def playing(logs: Path, args: dict[str, Any], says: str, **more: Any) -> AsyncIterator[Inside]:
    python = interpreter("verifiers", "verifiers")
    section = {"id": "verifiers"}
    options: dict[str, Any] = {"python": python, "engine": Engine(says), "start_s": START_S, "hang_s": 300.0}
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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"env": "vf_nowhere"}, "vf_nowhere"),
        ({"env": {"taskset": {"id": "vf_sums", "mots": 5}}}, "mots"),
        ({"env": {"taskset": {"id": "vf_sums"}, "id": "user-sim"}}, "several agents .assistant, user."),
        ({"env": {"taskset": {"id": "vf_sums"}, "id": "user-sim"}, "trains": "assistant"}, "agent 'user'"),
    ],
)
async def test_what_cannot_be_played_is_named(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with playing(tmp_path, args, ""):
            pass


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.parametrize("taskset", ["vf_sums", "vf_guess"])
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
    assert all(turn.extends for r in trained for turn in r.turns[1:])
    for rollout in trained:
        for turn in rollout.turns:
            assert len(turn.sampled_ids) == len(turn.logprobs) == sum(n for _, n in turn.versions)
