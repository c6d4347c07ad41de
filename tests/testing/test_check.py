"""`paceline env check` finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.domain.task import Split
from paceline.envs import (
    Context,
    Environment,
    GroupEnv,
    ListTasks,
    Model,
    MultiAgentEnv,
    MultiTurnEnv,
    Observation,
    Result,
    Seat,
    SingleTurnEnv,
)
from paceline.envs.builtin.environments import Arithmetic, GuessNumber
from paceline.envs.builtin.store_search import StoreSearch
from paceline.runtime.doctor import Finding
from paceline.testing.check import check_environment


class Good(SingleTurnEnv):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([f"{split} {n}" for n in range(9)])

    def prompt(self, data: Any) -> str:
        return str(data)

    def score(self, data: Any, text: str) -> float:
        return len(text) / 400


class Raises(Good):
    def score(self, data: Any, text: str) -> float:
        return 1.0 / len(text)


class Unscored(Good):
    def score(self, data: Any, text: str) -> Any:
        return None if text == "42" else 1.0


class Flat(Good):
    def score(self, data: Any, text: str) -> float:
        return 0.5


class SameTasks(Good):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["a", "b"])


class OtherTasks(Good):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([random.random() for _ in range(9)], fingerprint="the same")


class Random(Good):
    def prompt(self, data: Any) -> str:
        return str(random.random())


class Unlike(MultiTurnEnv[int]):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([split])

    def start(self, data: Any, ctx: Context) -> tuple[int, str]:
        return 0, f"{ctx.rng.integers(10**9)}"

    def step(self, state: int, text: str) -> Observation:
        return Observation(text, done=state > 2, reward=float(len(text)), state=state + 1)


class NoTruncation(Environment):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([split])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        length = 0
        for _ in range(3):
            length += len((await model.complete([{"role": "user", "content": str(length)}])).text)
        return Result(float(length))


class Blocks(Good):
    def score(self, data: Any, text: str) -> float:
        time.sleep(0.2)
        return len(text) / 400


class Sleeps(Blocks):
    blocking = True


class Holds(Good):
    async def score(self, data: Any, text: str) -> float:
        time.sleep(0.2)  # noqa: ASYNC251
        return len(text) / 400


class Says(Environment):
    """One call, and then whatever `end` does."""

    def tasks(self, split: Split) -> Any:
        return ListTasks([{"q": f"{split} {n}", "seen": []} for n in range(3)])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Any:
        return await self.end(task, await model.chat(task.data["q"]))

    async def end(self, task: Any, reply: Any) -> Any:
        return Result(float(len(reply.text)))


class Nothing(Says):
    async def end(self, task: Any, reply: Any) -> Any:
        pass


class NotANumber(Says):
    async def end(self, task: Any, reply: Any) -> Any:
        return Result(float("nan"))


class AText(Says):
    async def end(self, task: Any, reply: Any) -> Any:
        return Result("good")  # type: ignore[arg-type]


class Unawaited(Says):
    async def rollout(self, task: Any, model: Model, ctx: Context) -> Any:
        return self.end(task, await model.chat("q"))


class NotAsync(Says):
    def rollout(self, task: Any, model: Model, ctx: Context) -> Any:
        return Result(1.0)


class Changes(Says):
    def __init__(self) -> None:
        self.all = {split: ListTasks([{"q": split, "seen": []}], split) for split in ("train", "eval")}

    def tasks(self, split: Split) -> Any:
        return self.all[split]

    async def end(self, task: Any, reply: Any) -> Any:
        task.data["seen"].append(reply.text)
        return Result(float(len(reply.text)))


class Waits(Says):
    async def end(self, task: Any, reply: Any) -> Any:
        await asyncio.Event().wait()


class NoSource(Says):
    def tasks(self, split: Split) -> Any:
        return ["a", "b"]


class Wins(GroupEnv):
    """The shortest of a group's answers."""

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([split])

    async def rollout_group(self, task: Any, seats: Sequence[Seat]) -> Any:
        replies = await asyncio.gather(*(seat.model.chat(task.data) for seat in seats))
        return self.results(task, [len(reply.text) for reply in replies])

    def results(self, task: Any, lengths: list[int]) -> Any:
        return [Result(float(length == min(lengths))) for length in lengths]


class WinsNothing(Wins):
    def results(self, task: Any, lengths: list[int]) -> Any:
        pass


class WinsAlone(Wins):
    def results(self, task: Any, lengths: list[int]) -> Any:
        return [Result(1.0)]


class WinsSometimes(Wins):
    def results(self, task: Any, lengths: list[int]) -> Any:
        return [Result(1.0 / length) for length in lengths]


class WinsByChance(Wins):
    def results(self, task: Any, lengths: list[int]) -> Any:
        return [Result(random.random()) for _ in lengths]


class WinsAtOnce(Wins):
    def rollout_group(self, task: Any, seats: Sequence[Seat]) -> Any:
        return [Result(1.0) for _ in seats]


class Duel(MultiAgentEnv):
    """Three roles, one of which plays only."""

    roles = ("solver", "critic", "judge")
    frozen = ("critic",)

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([split])

    async def episode(self, task: Any, seats: Mapping[str, Seat]) -> Any:
        answer = await seats["solver"].model.chat(task.data)
        verdict = await seats["critic"].model.chat(answer.text)
        last = await seats["judge"].model.chat(verdict.text)
        return self.scored(
            {
                "solver": Result(len(answer.text) / 400),
                "critic": Result(99.0),
                "judge": Result(len(last.text) / 400),
            }
        )

    def scored(self, results: dict[str, Result]) -> Any:
        return results


class DuelOfNobody(Duel):
    def scored(self, results: dict[str, Result]) -> Any:
        return list(results.values())


def found(make: Callable[[], Environment]) -> list[Finding]:
    return check_environment(make, tasks=1)


@pytest.mark.parametrize("make", [Good, Arithmetic, Wins, Duel], ids=lambda m: m.__name__)
def test_nothing_is_found_where_nothing_is_wrong(make: Callable[[], Environment]) -> None:
    assert [f for f in found(make) if f.level != "ok"] == []


@pytest.mark.parametrize("make", [GuessNumber, StoreSearch], ids=lambda m: m.__name__)
def test_games_pass_once_the_model_may_say_a_right_answer(make: Callable[[], Environment]) -> None:
    findings = check_environment(make, tasks=4, answers=["8", "4", "12", "2", "6", "10", "14"])
    assert [f for f in findings if f.level != "ok"] == []


@pytest.mark.parametrize(
    ("make", "level", "says"),
    [
        (Raises, "error", "failed (unscored)"),
        (Unscored, "error", "failed (unscored)"),
        (Flat, "warning", "same reward"),
        (SameTasks, "warning", "train and eval have the same tasks"),
        (OtherTasks, "error", "another one each time"),
        (Random, "warning", "comes out differently"),
        (Unlike, "warning", "asked different things"),
        (NoTruncation, "warning", "has no reward"),
        (NoTruncation, "warning", "do not extend"),
        (Holds, "warning", "holds up the loop"),
        (Blocks, "warning", "take their time"),
        (WinsByChance, "warning", "comes out differently"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_fault_is_found_and_comes_with_a_remedy(make: Any, level: str, says: str) -> None:
    finding, *_ = [f for f in found(make) if says in f.what]  # train and eval may share it
    assert (finding.level, bool(finding.remedy)) == (level, True)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize(
    ("make", "facts", "remedy"),
    [
        (Nothing, "returned NoneType", "return Result(reward=...)"),
        (NotANumber, "the reward is nan", "finite number"),
        (AText, "could not convert", "rewards and metrics as numbers"),
        (Unawaited, "returned coroutine", "`await` is missing"),
        (NotAsync, "can't be used in 'await'", "async def rollout"),
        (Changes, "'seen': []} is", "copy task.data"),
        (Waits, "simulated time; after 1 model calls", "give the wait a time limit"),
        (NoSource, "returned a list", "return ListTasks"),
        (WinsNothing, "returned NoneType", "`Result` for every seat"),
        (WinsAlone, "1 results for 4 seats", "one `Result` for every seat"),
        (WinsSometimes, "ZeroDivisionError", "may be anything"),
        (WinsAtOnce, "plain function", "async def"),
        (DuelOfNobody, "episode() returned list", "for every role"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_common_slip_is_told_by_what_it_is(make: Any, facts: str, remedy: str) -> None:
    finding, *_ = [f for f in found(make) if f.level == "error"]
    assert facts in finding.facts
    assert remedy in finding.remedy


def test_tasks_that_are_fewer_than_asked_for_are_all_there_is() -> None:
    findings = check_environment(SameTasks, tasks=3)
    assert [f for f in findings if f.level == "error"] == []
    assert any(f.what.startswith("16 rollouts") for f in findings)


def test_a_group_is_as_large_as_it_is_said_to_be_and_deals_its_roles() -> None:
    (told,) = [f for f in check_environment(Wins, tasks=1, group_size=2) if "odd answers" in f.what]
    assert told.what.startswith("16 rollouts")
    (told,) = [f for f in check_environment(Duel, tasks=1) if "odd answers" in f.what]
    assert told.what.startswith("48 rollouts")
    (rewards,) = [f for f in check_environment(Duel, tasks=1) if f.what == "rewards"]
    assert rewards.facts == "from 0 to 0.64", "those of a role that only plays are left out"
    (wrong,) = [f for f in check_environment(Duel, tasks=1, group_size=4) if f.level == "error"]
    assert "set group_size to a multiple of 3" in wrong.facts


async def _spins() -> None:
    while True:
        try:
            await asyncio.sleep(0)
        except Exception:
            continue


def _computes() -> None:
    while True:
        pass


@pytest.mark.parametrize("way", ["spins", "computes"])
def test_code_without_an_end_ends_the_check_which_says_so(way: str) -> None:
    class Endless(Says):
        async def end(self, task: Any, reply: Any) -> Any:
            if way == "spins":
                await _spins()
            _computes()

    (finding,) = check_environment(Endless, tasks=1, seconds=1.5)
    assert (finding.level, finding.what) == ("error", "its code does not come to an end")
    assert "it ran for 1.5 s" in finding.facts
    assert way == "spins" or "test_check.py" in finding.facts


def test_blocking_code_is_named_with_its_line_and_a_thread_is_no_fault() -> None:
    said = ("holds up", "take their time")
    for env, what in ((Holds, "holds up"), (Blocks, "take their time")):
        (finding,) = [f for f in found(env) if any(words in f.what for words in said)]
        assert what in finding.what
        assert "test_check.py:" in finding.facts
    assert [f for f in found(Sleeps) if any(words in f.what for words in said)] == []


def test_a_new_package_has_nothing_wrong_and_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", "tiny-sums", "--dir", str(tmp_path)]) == 0
    made = tmp_path / "tiny-sums"
    assert sorted(str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()) == [
        "README.md",
        "pyproject.toml",
        "run.toml",
        "tests/conftest.py",
        "tests/test_tiny_sums.py",
        "tiny_sums/__init__.py",
    ]
    monkeypatch.syspath_prepend(str(made))
    assert main(["env", "check", str(made / "run.toml")]) == 0
    assert "nothing is wrong with it" in capsys.readouterr().out
    assert main(["init", "tiny-sums", "--dir", str(tmp_path)]) == 2
    assert main(["init", "7", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is there already" in said
    assert "no name for a Python package" in said


@pytest.mark.torch
@pytest.mark.demo
def test_a_new_package_passes_its_own_tests_which_train_three_steps(tmp_path: Path) -> None:
    import subprocess
    import sys

    pytest.importorskip("torch")
    assert main(["init", "sums", "--dir", str(tmp_path)]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x"],
        cwd=tmp_path / "sums",
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
