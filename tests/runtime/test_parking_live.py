"""Parking and token budgets through the real runner: calls are aborted and go on with the same ids."""

from __future__ import annotations

import msgspec
import pytest

from paceline.domain import commands as do
from paceline.ports import GenerateRequest
from paceline.testing import ScriptedEngine, ScriptedEnv, run_driver, setup_for, train_env
from paceline.testing.halving import Halves
from paceline.testing.tokens import byte_tokenizer

TEXT = "twenty-four characters.."
IDS = [int(i) for i in byte_tokenizer().encode(TEXT)]


def rest(request: GenerateRequest) -> str:
    """What is still to be said of the text, given what the prompt ends with."""
    sent = request.token_ids.tolist()
    for done in range(len(IDS), 0, -1):
        if sent[-done:] == IDS[:done]:
            return TEXT[done:]
    return TEXT


def engine() -> ScriptedEngine:
    return ScriptedEngine(answer=rest, seconds=lambda request: 0.5 * (len(rest(request)) + 1))


def test_parked_calls_are_aborted_and_go_on_token_for_token() -> None:
    setup = setup_for(train_env(group_size=2), batch=4, max_steps=2, seq_len=512)
    run = run_driver(
        setup, {"env": ScriptedEnv()}, engines=[engine()], admission=Halves(4), poll_s=1.7, max_seconds=5000
    )
    assert run.commands(do.ParkRollout)
    assert len(run.engines["e0"].aborts) > 0
    done = [r for r in run.rollouts if r.outcome.ending == "completed"]
    assert done
    assert {bytes(byte_tokenizer().decode(t.sampled_ids), "utf-8") for r in done for t in r.turns} == {
        TEXT.encode()
    }
    assert max(t.segments for r in done for t in r.turns) > 1
    assert not [r for r in run.rollouts if r.outcome.ending == "failed"]


@pytest.mark.parametrize("budget", [1, 5, 24, 25, 26])
def test_a_token_budget_gives_the_same_tokens_in_more_requests(budget: int) -> None:
    setup = setup_for(train_env(group_size=2), batch=4, max_steps=1, seq_len=512)
    setup = msgspec.structs.replace(setup, segment_tokens=budget)
    run = run_driver(setup, {"env": ScriptedEnv()}, engines=[engine()], max_seconds=5000)
    assert max(request.sampling.max_tokens for request in run.engines["e0"].requests) <= budget
    done = [r for r in run.rollouts if r.outcome.ending == "completed"]
    assert {len(t.sampled_ids) for r in done for t in r.turns} == {len(IDS) + 1}
    assert {t.segments for r in done for t in r.turns} == {-(-(len(IDS) + 1) // budget)}
