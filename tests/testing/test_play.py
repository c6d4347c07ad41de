"""One rollout of an environment against scripted answers: the real endings, in no time."""

from __future__ import annotations

from paceline.config import Limits
from paceline.domain.task import Task
from paceline.envs import Context, Environment, ListTasks, Model, Result, SingleTurnEnv, make_environment
from paceline.errors import EngineError
from paceline.testing import play


class Capitals(SingleTurnEnv):
    def tasks(self, split: str) -> ListTasks:
        return ListTasks([{"country": "France", "capital": "Paris"}])

    def prompt(self, data: dict[str, str]) -> str:
        return f"Capital of {data['country']}?"

    def score(self, data: dict[str, str], text: str) -> float:
        return float(text == data["capital"])


class Slow(Environment):
    def tasks(self, split: str) -> ListTasks:
        return ListTasks(["task"])

    async def rollout(self, task: Task, model: Model, ctx: Context) -> Result:
        await model.chat("go on")
        await ctx.sleep(3600)
        return Result(reward=1.0)


def test_a_right_answer_and_a_wrong_one_score() -> None:
    right, wrong = play(Capitals(), ["Paris"]), play(Capitals(), ["London"])
    assert (right.outcome.ending, right.reward) == ("completed", 1.0)
    assert (wrong.outcome.ending, wrong.reward) == ("completed", 0.0)
    assert [m.content for m in right.messages] == ["Capital of France?", "Paris"]


def test_answers_may_follow_from_the_prompt() -> None:
    game = make_environment("guess-number", {"wait_s": 5.0})

    def halve(prompt: str) -> str:
        low, high, guess = 1, 15, 8
        for word in prompt.split():
            low, high = (guess + 1, high) if word.startswith("higher") else (low, high)
            low, high = (low, guess - 1) if word.startswith("lower") else (low, high)
            guess = (low + high) // 2
        return str(guess)

    rollout = play(game, halve)
    assert rollout.metrics["won"] == 1.0
    assert rollout.ended == 5.0 * (len(rollout.turns) - 1)


def test_limits_end_a_rollout_as_they_do_in_a_run() -> None:
    late = play(Slow(), ["yes"], limits=Limits(deadline_s=60))
    assert (late.outcome.ending, late.outcome.cause, late.ended) == ("truncated", "deadline", 60.0)
    cut = play(Capitals(), ["Paris, of course"], max_tokens=5)
    assert (cut.outcome.cause, cut.reward, cut.sampled_tokens) == ("tokens", 1.0, 5)


def test_a_deadline_in_the_middle_of_an_answer_keeps_what_was_said() -> None:
    late = play(Capitals(), ["Paris"], limits=Limits(deadline_s=2.5), token_s=1.0)
    assert (late.outcome.cause, late.sampled_tokens, late.reward) == ("deadline", 2, 0.0)


def test_an_engine_that_fails_and_a_script_that_is_too_short_are_told() -> None:
    failed = play(Capitals(), [EngineError("503")])
    assert (failed.outcome.ending, failed.outcome.cause) == ("failed", "engine")
    short = play(make_environment("guess-number", {}), ["16"])
    assert "model call 2, the script has 1" in short.outcome.detail
