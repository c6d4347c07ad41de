"""reasoning-gym and TextArena, in worker processes whose interpreter has them; and a few steps of training on each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from adapter_kit import interpreter, three_steps
from worker_kit import Engine, inside

from paceline.errors import ConfigError

pytestmark = pytest.mark.adapter


async def test_reasoning_gym_asks_and_scores_by_its_data_set(tmp_path: Path) -> None:
    python = interpreter("reasoning-gym", "reasoning_gym")
    args = {"dataset": "chain_sum", "size": 50, "config": {"max_terms": 2, "max_digits": 1}}
    async with inside(
        tmp_path, "reasoning-gym", args, python=python, engine=Engine("3"), section={"id": "reasoning-gym"}
    ) as run:
        assert run.environment.tasks("train").size == 50
        rollouts = await asyncio.gather(*(run.roll_out(0, group=n, index=n) for n in range(40)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        for rollout in rollouts:
            assert (rollout.reward == 1.0) == (rollout.info["answer"] == "3"), rollout.info
        assert len({r.info["question"] for r in rollouts}) > 20


async def test_a_scorer_that_raises_at_junk_scores_as_it_is_told(tmp_path: Path) -> None:
    python = interpreter("reasoning-gym", "reasoning_gym")
    args: dict[str, Any] = {"dataset": "prime_factorization", "size": 5}
    async with inside(
        tmp_path, "x", args, python=python, engine=Engine("wrong"), section={"id": "reasoning-gym"}
    ) as run:
        rollout = await run.roll_out()
        assert (rollout.outcome.ending, rollout.reward) == ("completed", 0.0)


async def test_an_unknown_data_set_is_named(tmp_path: Path) -> None:
    python = interpreter("reasoning-gym", "reasoning_gym")
    with pytest.raises(ConfigError, match="chain_sums"):
        async with inside(
            tmp_path, "x", {"dataset": "chain_sums"}, python=python, section={"id": "reasoning-gym"}
        ):
            pass


async def test_textarena_plays_a_game_turn_by_turn_and_prompts_extend(tmp_path: Path) -> None:
    python = interpreter("reasoning-gym", "textarena")
    args = {"game": "GuessTheNumber-v0", "template": "[{}]"}
    async with inside(
        tmp_path, "x", args, python=python, engine=Engine("7"), section={"id": "textarena"}
    ) as run:
        first, again = [await run.roll_out(member, index=1) for member in (0, 1)]
        assert first.outcome.ending == "completed"
        assert len(first.turns) > 1
        assert all(turn.extends for turn in first.turns[1:])
        assert first.reward is not None
        assert [m.content for m in first.messages] == [m.content for m in again.messages]


async def test_textarena_against_a_service_and_against_itself(tmp_path: Path) -> None:
    python = interpreter("reasoning-gym", "textarena")

    async def ask(service: str, messages: Any) -> str:
        assert service == "opponent"
        return "[3]"

    args = {"game": "TicTacToe-v0", "players": 2}
    async with inside(
        tmp_path, "x", args, python=python, engine=Engine("[5]"), ask=ask, section={"id": "textarena"}
    ) as run:
        rollout = await run.roll_out()
        assert rollout.outcome.ending == "completed"
        assert rollout.reward is not None
    async with inside(
        tmp_path,
        "x",
        {"game": "TicTacToe-v0"},
        python=python,
        engine=Engine("[5]"),
        group_size=2,
        section={"id": "textarena-selfplay"},
    ) as run:
        pair = await asyncio.gather(*(run.roll_out(m) for m in range(2)))
        assert {r.role for r in pair} == {"player_0", "player_1"}
        assert sum(r.reward or 0.0 for r in pair) == 0.0  # one has lost what the other has won


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("reasoning-gym", {"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}}),
        ("textarena", {"game": "GuessTheNumber-v0", "template": "[{}]", "rules": "Guess: 1 to 15"}),
    ],
)
def test_three_steps_are_trained_on_it(tmp_path: Path, env: str, args: dict[str, Any]) -> None:
    from paceline import run

    python = interpreter("reasoning-gym", "reasoning_gym" if env == "reasoning-gym" else "textarena")
    section = {
        "id": env,
        "args": args,
        "group_size": 4,
        "limits": {"max_turns": 3, "max_context": 500},
        "workers": {"type": "process", "python": python},
    }
    summary = run(three_steps(tmp_path, section))
    assert (summary["status"], summary["steps"]) == ("done", 3), summary
