"""Environments: the protocol, the helpers, the built-ins, and how they are found."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.domain.ids import RolloutId
from paceline.domain.task import Task, TaskRef
from paceline.envs import (
    Context,
    EndlessTasks,
    Environment,
    ListTasks,
    MultiTurnEnv,
    Observation,
    Reply,
    Result,
    ScoringError,
    SingleTurnEnv,
    cut_text,
    environment_class,
    make_environment,
    weighed,
)
from paceline.envs.surroundings import ColdStarts, InRun
from paceline.errors import ConfigError, EnvError
from paceline.testing import run_virtual

REF = TaskRef("env", "train", 0)


class Says:
    """A model that gives the answers it was told to, and remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.last: Reply | None = None

    async def chat(self, *says: Any, **_: Any) -> Reply:
        self.asked.append(says[0] if len(says) == 1 else list(says))
        self.last = Reply(self.answers.pop(0), "stop", None, None)  # type: ignore[arg-type]
        return self.last


def play(env: Environment, model: Any, data: Any, ctx: Context | None = None) -> Result:
    async def main() -> Result:
        return await env.rollout(Task(REF, data), model, ctx or context())

    return run_virtual(main())


def context() -> Context:
    return Context(RolloutId(0, 0), group_seed=1, noise_seed=2, deadline=60.0, clock=lambda: 20.0)


@pytest.mark.parametrize("env_id", ["reverse-text", "arithmetic", "guess-number", "store-search"])
def test_built_in_environments_have_endless_repeatable_tasks_in_both_splits(env_id: str) -> None:
    env = make_environment(env_id, {"seed": 3})
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert train.size is None
    assert train.get(7) == make_environment(env_id, {"seed": 3}).tasks("train").get(7)
    assert (
        len(
            {train.fingerprint, held_out.fingerprint, make_environment(env_id, {}).tasks("train").fingerprint}
        )
        == 3
    )


def test_reverse_text_asks_once_and_scores_the_answer() -> None:
    env = make_environment("reverse-text", {})
    data = env.tasks("train").get(0)
    model = Says(data.answer)
    assert play(env, model, data).reward == 1.0
    assert model.asked == [{"role": "user", "content": f"Reverse: {data.text}"}]


def test_arithmetic_scores_right_and_wrong() -> None:
    env = make_environment("arithmetic", {})
    data = env.tasks("train").get(0)
    assert play(env, Says(str(data.answer)), data).reward == 1.0
    assert play(env, Says(str(data.answer + 1)), data).reward == 0.1


def test_guess_number_goes_on_until_found_and_waits_in_between() -> None:
    env = make_environment("guess-number", {"wait_s": 2.5})
    tasks = env.tasks("train")
    data = next(tasks.get(i) for i in range(100) if tasks.get(i).hidden == 6)
    model = Says("8", "4", "6")

    async def main() -> tuple[Result, float]:
        import asyncio

        result = await env.rollout(Task(REF, data), model, context())  # type: ignore[arg-type]
        return result, asyncio.get_running_loop().time()

    result, seconds = run_virtual(main())
    assert result.reward == pytest.approx(0.8)
    assert result.metrics == {"guesses": 3.0, "won": 1.0}
    assert model.asked[1:] == ["lower", "higher"]
    assert seconds == 5.0


def test_a_single_turn_score_may_be_a_result_or_async_or_raise() -> None:
    class Env(SingleTurnEnv):
        system_prompt = "Be brief."

        def prompt(self, data: Any) -> str:
            return "hi"

        async def score(self, data: Any, text: str) -> Any:
            return Result(0.5, info={"text": text})

    model = Says("yes")
    assert play(Env(), model, None) == Result(0.5, info={"text": "yes"})
    assert [m["role"] for m in model.asked[0]] == ["system", "user"]

    class Raises(Env):
        def score(self, data: Any, text: str) -> Any:
            raise KeyError("answer")

    with pytest.raises(ScoringError, match="score\\(\\) raised KeyError: 'answer'"):
        play(Raises(), Says("yes"), None)


def test_s34_a_scorer_that_only_logs_cannot_move_the_reward_and_any_other_that_fails_leaves_none() -> None:
    class Scored(SingleTurnEnv):
        def __init__(self, **weights: float) -> None:
            self.weights = weights

        def prompt(self, data: Any) -> str:
            return "hi"

        async def score(self, data: Any, text: str) -> Result:
            made = {"a": self.a, "b": lambda data, text: float("nan"), "c": self.c, "d": lambda *_: len(data)}
            scorers = {name: (self.weights.get(name, 0.0), scorer) for name, scorer in made.items()}
            return await weighed(scorers, data, text)

        async def a(self, data: Any, text: str) -> float:
            return 0.7

        def c(self, data: Any, text: str) -> float:
            raise KeyError("judge")

    result = play(Scored(a=1.0), Says("yes"), "four")
    assert (result.reward, result.rewards, result.metrics) == (0.7, {"a": 0.7}, {"d": 4.0})
    failed = result.info["scorers_failed"]
    assert failed.keys() == {"b", "c"}
    assert "its value is nan" in failed["b"]
    assert "KeyError: 'judge' (test_environments.py:" in failed["c"]
    result = play(Scored(a=2.0, d=-0.5), Says("yes"), "four")
    assert (result.reward, result.rewards) == (pytest.approx(-0.6), {"a": 1.4, "d": -2.0})
    for name, why in (("b", "its value is nan"), ("c", "KeyError")):
        with pytest.raises(ScoringError, match=f"scorer '{name}': .*{why}"):
            play(Scored(a=1.0, **{name: 0.1}), Says("yes"), "four")


def test_blocking_code_runs_in_a_thread_and_its_time_is_not_the_loops() -> None:
    threads = []

    class Env(SingleTurnEnv):
        blocking = True

        def prompt(self, data: Any) -> str:
            return "hi"

        def score(self, data: Any, text: str) -> float:
            threads.append(threading.current_thread())
            return 1.0

    assert play(Env(), Says("x"), None).reward == 1.0
    assert threads[0] is not threading.main_thread()


def test_a_multi_turn_environment_sums_its_rewards_and_is_judged_by_them_when_cut() -> None:
    class Counts(MultiTurnEnv[list[str]]):
        def start(self, data: Any, ctx: Context) -> tuple[list[str], str]:
            return [], "begin"

        def step(self, state: list[str], text: str) -> Observation:
            state.append(text)
            return Observation("next", done=text == "stop", reward=0.25, metrics={"said": float(len(state))})

    ctx = context()
    assert play(Counts(), Says("a", "b", "stop"), None, ctx) == Result(
        0.75, metrics={"said": 3.0}, turn_rewards=(0.25, 0.25, 0.25)
    )
    cut = context()
    with pytest.raises(IndexError):
        play(Counts(), Says("a", "b"), None, cut)
    judged = run_virtual(Counts().on_truncated(Task(REF, None), Says(), cut, "turns"))  # type: ignore[arg-type]
    assert judged is not None
    assert judged.reward == 0.5
    assert run_virtual(Counts().on_truncated(Task(REF, None), Says(), context(), "turns")) is None  # type: ignore[arg-type]


def test_a_step_that_returns_no_observation_is_named() -> None:
    class Wrong(MultiTurnEnv[None]):
        def start(self, data: Any, ctx: Context) -> tuple[None, str]:
            return None, "begin"

        def step(self, state: None, text: str) -> Any:
            return "next"

    with pytest.raises(EnvError, match=r"step\(\) returned str; expected Observation"):
        play(Wrong(), Says("a"), None)


def test_an_environment_that_defines_nothing_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match=r"Environment must define tasks\(split\)"):
        Environment().tasks("train")


def test_a_list_of_tasks_is_told_from_another_by_its_content() -> None:
    assert ListTasks([1, 2]).fingerprint == ListTasks([1, 2]).fingerprint != ListTasks([2, 1]).fingerprint
    assert (ListTasks("ab", "mine").size, ListTasks("ab", "mine").fingerprint) == (2, "mine")
    assert EndlessTasks(lambda i: i * i, "squares").get(7) == 49


def test_the_context_knows_how_much_time_is_left() -> None:
    assert context().seconds_left == 40.0


def test_s90_three_that_make_twenty_each_at_four_a_second_take_fifteen_seconds_and_a_killed_one_blocks_nobody() -> (
    None
):
    seen: list[float] = []

    async def makes(run: InRun) -> None:
        for _ in range(20):
            async with run.cold_start():
                seen.append(asyncio.get_running_loop().time())

    async def main(killed: bool) -> float:
        run = InRun(cold_starts=ColdStarts(at_once=3, per_s=4.0))
        began = asyncio.get_running_loop().time()
        makers = [asyncio.create_task(makes(run)) for _ in range(3)]
        if killed:
            await asyncio.sleep(5.5)
            makers[0].cancel()
        await asyncio.gather(*makers, return_exceptions=True)
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main(killed=False)) == pytest.approx(15.0, abs=1.0)
    assert len(seen) == 60
    assert max(sum(at <= other < at + 1.0 for other in seen) for at in seen) <= 4
    seen.clear()
    # The third that had made 8 or so leaves the others its share.
    assert run_virtual(main(killed=True)) == pytest.approx(12.0, abs=1.0)
    assert 40 < len(seen) < 60


def test_s40_the_side_named_is_the_side_removed() -> None:
    assert cut_text("ABCDEFGH", 4, "left") == "…EFGH"
    assert cut_text("ABCDEFGH", 4, "right") == "ABCD…"
    assert cut_text("ABCDEFGH", 4, "middle") == "AB…GH"
    assert cut_text("ABCD", 4, "left") == "ABCD"
    for side in ("left", "right", "middle"):
        cut = cut_text("🎉🎊🎈", 1, side)  # type: ignore[arg-type]
        assert cut.encode().decode() == cut
        assert len(cut.replace("…", "")) == 1
    assert cut_text("ABC", 0, "middle") == "…"
    with pytest.raises(ValueError, match="the side that is removed"):
        cut_text("ABCDE", 4, "top")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env_id", "args", "told"),
    [
        ("reverse-txt", {}, "did you mean 'reverse-text'"),
        ("no_such_module:Env", {}, "no module 'no_such_module'"),
        ("my_envs:Ecko", {}, "has no 'Ecko'; did you mean 'Echo'"),
        ("my_envs:thing", {}, "expected a subclass of paceline.envs.Environment"),
        ("my_envs:Echo", {"tims": 2}, "no argument 'tims' .*did you mean 'times'"),
        ("my_envs:Echo", {}, "args.times is required"),
        ("my_envs:Echo", {"times": -1}, "refuses its args: at least once"),
        ("my_envs:Bare", {"x": 1}, "no argument 'x' .it takes: none"),
        ("my_broken_envs:Env", {}, "importing my_broken_envs failed: ZeroDivisionError"),
        ("my_needy_envs:Env", {}, "importing my_needy_envs needs 'no_such_package'"),
    ],
)
def test_what_is_wrong_with_an_environments_id_or_args_is_named(
    env_id: str, args: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_envs.py").write_text(
        "from paceline.envs import Environment\n"
        "thing = 3\n"
        "class Bare(Environment): ...\n"
        "class Echo(Environment):\n"
        "    def __init__(self, times: int) -> None:\n"
        "        if times < 1: raise ValueError('at least once')\n"
    )
    (tmp_path / "my_broken_envs.py").write_text("1 / 0\n")
    (tmp_path / "my_needy_envs.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ConfigError, match=told):
            make_environment(env_id, args)
        assert environment_class("my_envs:Echo").__name__ == "Echo"
    finally:
        for name in ("my_envs", "my_broken_envs", "my_needy_envs"):
            sys.modules.pop(name, None)
