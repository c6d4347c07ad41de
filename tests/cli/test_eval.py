"""`paceline eval`: a chat endpoint plays a config's evals, with messages alone, within their limits."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from paceline.cli import eval as eval_command
from paceline.cli.main import main
from paceline.domain.task import Split
from paceline.envs import (
    Context,
    GroupEnv,
    ListTasks,
    Model,
    Result,
    Seat,
    SingleTurnEnv,
    ToolEnv,
)

Answer = Callable[[dict[str, Any]], Any]
"""The request's body → a text, a whole message, seconds to wait, or a status."""


class Endpoint:
    """A chat endpoint in a thread of its own."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: body["messages"][-1]["content"].removeprefix("Reverse: ")[::-1]
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Endpoint:
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answered)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._up.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answered(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        answer = self.answer(body)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no"}}, status=answer)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = ""
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        finish = "length" if message.get("content") == "cut" else message.pop("finish", "stop")
        usage = {"prompt_tokens": 7 * len(body["messages"]), "completion_tokens": 5}
        usage = message.pop("usage", usage)
        return web.json_response({"choices": [{"message": message, "finish_reason": finish}], "usage": usage})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as found:
        yield found


@pytest.fixture
def evaluated(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[dict[str, Any]]]]:
    """Exit code, what was printed, and the rollouts; without `in_words`, what was printed is JSON."""

    def evaluate(eval_id: str, *words: str, in_words: bool = False, **options: Any):  # type: ignore[no-untyped-def]
        lines = [
            f'model.name = "{tmp_path / "nowhere"}"',
            "[chat.other]",
            f'url = "{endpoint.url}"',
            'model = "some-model"',
            "[[env]]",
            'id = "reverse-text"',
            "[[eval]]",
            f'id = "{eval_id}"',
            *(f"{name.replace('__', '.')} = {json.dumps(value)}" for name, value in options.items()),
        ]
        config, out = tmp_path / "run.toml", tmp_path / "out.jsonl"
        config.write_text("\n".join(lines))
        how = [] if in_words else ["--json"]
        code = main(["eval", str(config), "--chat", "other", "--out", str(out), *how, *words])
        assert out.exists(), capsys.readouterr().err
        return code, capsys.readouterr().out, [json.loads(line) for line in out.read_text().splitlines()]

    return evaluate


def test_an_endpoint_plays_an_eval_and_is_measured(endpoint: Endpoint, evaluated: Any) -> None:
    code, printed, rollouts = evaluated("reverse-text", examples=6, k=2)
    report = json.loads(printed)
    assert code == 0
    assert (report["chat"], report["model"], report["env"]) == ("other", "some-model", "reverse-text")
    assert (report["rollouts"], report["scored"], report["mean_reward"]) == (12, 12, 1.0)
    assert report["by_ending"] == {"completed": 12}
    assert (report["settled"], report["examples"]) == (6, 6)
    assert report["mean_tokens"] == 5.0
    assert sorted((r["example"], r["member"]) for r in rollouts) == [
        (e, m) for e in range(6) for m in range(2)
    ]
    first = rollouts[0]
    assert [m["role"] for m in first["messages"]][-2:] == ["user", "assistant"]
    assert (first["reward"], first["turns"], first["sampled_tokens"], first["prompt_tokens"] % 7) == (
        1.0,
        1,
        5,
        0,
    )
    # What is the endpoint's default is not said.
    assert {name for body in endpoint.asked for name in body} == {"model", "messages", "stream", "max_tokens"}


def test_it_says_in_words_what_it_measured(endpoint: Endpoint, evaluated: Any) -> None:
    code, printed, _ = evaluated("reverse-text", "--at-once", "1", in_words=True, examples=4)
    assert code == 0
    assert printed.startswith("reverse-text: reward 1.000  pass@1 1.000  4 of 4 rollouts scored  4 completed")


def test_several_turns_are_one_conversation(endpoint: Endpoint, evaluated: Any) -> None:
    low_high: dict[str, tuple[int, int]] = {}

    def halves(body: dict[str, Any]) -> str:
        low, high = 0, 100
        for said, heard in zip(body["messages"], body["messages"][1:], strict=False):
            if said["role"] == "assistant" and said["content"].strip().isdigit():
                number = int(said["content"])
                low, high = (number + 1, high) if "higher" in heard["content"] else (low, number - 1)
        low_high[str(body["messages"][0])] = low, high
        return str((low + high) // 2)

    endpoint.answer = halves
    code, printed, rollouts = evaluated("guess-number", examples=5)
    assert code == 0
    assert json.loads(printed)["scored"] == 5
    assert max(r["turns"] for r in rollouts) > 1
    for rollout in rollouts:
        roles = [message["role"] for message in rollout["messages"]]
        assert roles.count("assistant") == rollout["turns"]


class Adds(ToolEnv):
    declares: bool = True

    def __init__(self) -> None:
        self.tools = [self.add]

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1, 2])

    def prompt(self, data: Any) -> str:
        return "2+2 and 3+3?"

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def score(self, data: Any, state: Any, text: str) -> float:
        return float(text == "4 and 6")


def test_its_tool_calls_are_carried_out_and_answered_under_its_own_names(
    endpoint: Endpoint, evaluated: Any
) -> None:
    def calls(body: dict[str, Any]) -> Any:
        results = [m for m in body["messages"] if m["role"] == "tool"]
        if results:
            return " and ".join(m["content"] for m in results)
        assert body["tools"][0]["function"]["name"] == "add"
        wanted = [("x1", '{"a": 2, "b": 2}'), ("x2", '{"a": 3, "b": 3}')]
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}
                for id_, arguments in wanted
            ],
        }

    endpoint.answer = calls
    code, printed, rollouts = evaluated(f"{__name__}:Adds", examples=2)
    assert (code, json.loads(printed)["mean_reward"]) == (0, 1.0)
    said = endpoint.asked[-1]["messages"]
    assert [m.get("tool_call_id") for m in said if m["role"] == "tool"] == ["x1", "x2"]
    assert [c["id"] for m in said for c in m.get("tool_calls", ())] == ["x1", "x2"]
    assert rollouts[0]["metrics"]["tool_calls"] == 2


def test_an_environment_in_a_worker_process_is_played_too(endpoint: Endpoint, evaluated: Any) -> None:
    code, printed, rollouts = evaluated("reverse-text", examples=3, workers__type="process")
    assert (code, json.loads(printed)["mean_reward"]) == (0, 1.0)
    assert rollouts[0]["sampled_tokens"] == 5


class Hears(Adds):
    observe_as = "user"

    def score(self, data: Any, state: Any, text: str) -> float:
        return float(text == "done")


def test_calls_that_are_not_answered_as_calls_are_no_calls_to_the_endpoint(
    endpoint: Endpoint, evaluated: Any
) -> None:
    def calls(body: dict[str, Any]) -> Any:
        if len(body["messages"]) > 1:
            return "done"
        look = {"name": "add", "arguments": '{"a": 2, "b": "</tool_call>"}'}
        return {"content": None, "tool_calls": [{"id": "x1", "type": "function", "function": look}]}

    endpoint.answer = calls
    code, printed, _ = evaluated(f"{__name__}:Hears", examples=1)
    assert (code, json.loads(printed)["mean_reward"]) == (0, 1.0)
    said = endpoint.asked[-1]["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "user"]
    assert said[1]["content"].count("<tool_call>") == 1
    assert not any("tool_calls" in m for m in said)


def test_a_call_without_arguments_is_one(endpoint: Endpoint, evaluated: Any) -> None:
    def calls(body: dict[str, Any]) -> Any:
        if results := [m["content"] for m in body["messages"] if m["role"] == "tool"]:
            return results[0]
        wanted = {"name": "look", "arguments": ""}
        return {"content": None, "tool_calls": [{"id": "x1", "type": "function", "function": wanted}]}

    endpoint.answer = calls
    assert json.loads(evaluated(f"{__name__}:Looks", examples=1)[1])["mean_reward"] == 1.0


class Looks(Adds):
    def __init__(self) -> None:
        self.tools = [self.look]

    def look(self) -> str:
        """Look."""
        return "seen"

    def score(self, data: Any, state: Any, text: str) -> float:
        return float(text == "seen")


def test_who_spends_all_it_may_say_on_thinking_has_answered_nothing_and_is_scored(
    endpoint: Endpoint, evaluated: Any
) -> None:
    endpoint.answer = lambda body: {"role": "assistant", "content": None, "finish": "length"}
    _, printed, (rollout,) = evaluated("reverse-text", examples=1)
    assert (rollout["ending"], rollout["cause"], rollout["reward"]) == ("truncated", "tokens", 0.0)
    assert json.loads(printed)["scored"] == 1


def test_who_counts_no_tokens_is_counted_at_four_characters_each(endpoint: Endpoint, evaluated: Any) -> None:
    endpoint.answer = lambda body: {"role": "assistant", "content": "more " * 20, "usage": None}
    _, _, (rollout,) = evaluated(f"{__name__}:Asks", examples=1, limits__max_context=64)
    assert (rollout["cause"], rollout["turns"], rollout["sampled_tokens"]) == ("context", 3, 3 * 26)


@pytest.mark.parametrize("count", [-5, 10**15])
def test_counts_that_are_none_are_told_of_the_endpoint(
    endpoint: Endpoint, evaluated: Any, count: int
) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": 1}
    endpoint.answer = lambda body: {"role": "assistant", "content": "x", "usage": usage}
    code, printed, _ = evaluated("reverse-text", in_words=True, examples=1)
    assert code == 1
    assert "without a score, engine: chat other" in printed
    assert f"its reply counts {count} prompt tokens" in printed


class Half(SingleTurnEnv):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1])

    def prompt(self, data: Any) -> str:
        return "hi"

    def score(self, data: Any, text: str) -> float:
        raise ValueError("half a character: \ud800")


def test_half_a_character_costs_no_result(endpoint: Endpoint, evaluated: Any) -> None:
    _, _, (rollout,) = evaluated(f"{__name__}:Half", examples=1)
    assert "\ud800" in rollout["detail"]


class Holds(Half):
    blocking = False

    def score(self, data: Any, text: str) -> float:
        holds.set()
        while True:
            time.sleep(0.01)


holds = threading.Event()


def test_ctrl_c_cuts_off_code_that_holds_the_loop_and_what_was_measured_before_stays(
    endpoint: Endpoint, evaluated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_command, "CUT_OFF_S", 0.1)
    earlier = tmp_path / "out.jsonl"
    earlier.write_text('{"of": "an earlier command"}\n')
    ctrl_c = threading.Thread(target=lambda: holds.wait(60) and os.kill(os.getpid(), signal.SIGINT))
    ctrl_c.start()
    code, _, lines = evaluated(f"{__name__}:Holds", examples=1)
    ctrl_c.join()
    assert code == 130
    assert lines == [{"of": "an earlier command"}]


class Interrupts(Half):
    """Of its second example, one member ends with a Ctrl-C and the other never does."""

    sends = signal.SIGINT

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        await model.chat("hi")
        if task.ref.index == 1:
            if ctx.rollout.member == 1:
                await asyncio.Event().wait()
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), self.sends)
        return Result(1.0)

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([0, 1, 2])


class Terminates(Interrupts):
    sends = signal.SIGTERM


@pytest.mark.parametrize(("env", "in_words"), [("Interrupts", False), ("Terminates", True)])
def test_what_was_measured_until_ctrl_c_or_sigterm_is_told_as_a_part(
    evaluated: Any, env: str, in_words: bool
) -> None:
    code, printed, lines = evaluated(
        f"{__name__}:{env}", "--at-once", "2", in_words=in_words, examples=3, k=2
    )
    assert code == 130
    assert [(line["example"], line["ending"]) for line in lines] == [(n, "completed") for n in (0, 0, 1)]
    if in_words:
        assert " (partial, 2 of 3 examples): reward 1.000  pass@1 1.000  pass@2 1.000  " in printed
        assert "3 of 4 rollouts scored  1 cancelled, 3 completed" in printed
    else:
        report = json.loads(printed)
        assert (report["settled"], report["examples"], report["scored"]) == (2, 3, 3)


@pytest.mark.parametrize(
    ("limits", "cause", "asked"),
    [
        ({"limits__max_rollout_tokens": 8}, "tokens", [8]),
        ({"limits__max_context": 100, "sampling__max_tokens": 512}, "context", [100]),
    ],
)
def test_an_answer_that_a_budget_has_cut_is_truncated_by_it(
    endpoint: Endpoint, evaluated: Any, limits: Any, cause: str, asked: list[int]
) -> None:
    endpoint.answer = lambda body: "cut"
    _, _, (rollout,) = evaluated("reverse-text", examples=1, **limits)
    assert (rollout["ending"], rollout["cause"]) == ("truncated", cause)
    assert [body["max_tokens"] for body in endpoint.asked] == asked


@pytest.mark.parametrize(
    ("limits", "cause", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_rollout_tokens": 8}, "tokens", 2),
        ({"max_context": 20}, "context", 2),
        ({"deadline_s": 0.3}, "deadline", 1),
    ],
)
def test_limits_hold(endpoint: Endpoint, evaluated: Any, limits: Any, cause: str, turns: int) -> None:
    def slow(body: dict[str, Any]) -> Any:
        return 60.0 if cause == "deadline" and len(body["messages"]) > 2 else "7"

    endpoint.answer = slow
    code, printed, (rollout,) = evaluated(
        f"{__name__}:Asks", examples=1, **{f"limits__{name}": value for name, value in limits.items()}
    )
    assert (rollout["ending"], rollout["cause"], rollout["turns"]) == ("truncated", cause, turns)
    assert (code, json.loads(printed)["mean_reward"]) == (0, turns)
    if cause == "tokens":
        assert [body["max_tokens"] for body in endpoint.asked] == [8, 3]


class Asks(SingleTurnEnv):
    """Asks for ever; what it was told is worth 1 an answer."""

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        ctx.state = 0
        while True:
            await model.chat("more?")
            ctx.state += 1

    async def on_truncated(self, task: Any, model: Model, ctx: Context, limit: Any) -> Result:
        return Result(float(ctx.state))


def test_an_answer_that_is_cut_is_truncated_and_scored(endpoint: Endpoint, evaluated: Any) -> None:
    endpoint.answer = lambda body: "cut"
    _, _, (rollout,) = evaluated("reverse-text", examples=1)
    assert (rollout["ending"], rollout["cause"]) == ("truncated", "tokens")
    assert rollout["reward"] is not None


class Meets(GroupEnv):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1, 2])

    async def rollout_group(self, task: Any, seats: Any) -> list[Result]:
        async def one(seat: Seat) -> Result:
            return Result(float(len((await seat.model.chat("Reverse: ab")).text)))

        return list(await asyncio.gather(*map(one, seats)))


def test_groups_that_meet_play_together_whatever_fits_at_once(endpoint: Endpoint, evaluated: Any) -> None:
    code, printed, _ = evaluated(f"{__name__}:Meets", "--at-once", "1", examples=2, k=4)
    assert (code, json.loads(printed)["mean_reward"]) == (0, 2.0)


def test_a_failure_of_the_endpoint_in_a_group_that_meets_has_one_cause(
    endpoint: Endpoint, evaluated: Any
) -> None:
    endpoint.answer = lambda body: 500 if len(endpoint.asked) == 1 else 60.0
    code, printed, _ = evaluated(f"{__name__}:Meets", examples=1, k=4)
    (cause, count), *others = json.loads(printed)["failures"].items()
    assert (code, count, others) == (1, 4, [])
    assert cause.startswith("engine: chat other")


class Continues(SingleTurnEnv):
    def tasks(self, split: Split) -> ListTasks:
        return ListTasks([1])

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        await model.generate([1, 2])
        return Result(1.0)


def test_what_an_endpoint_cannot_do_is_said(endpoint: Endpoint, evaluated: Any) -> None:
    code, printed, _ = evaluated(f"{__name__}:Continues", in_words=True, examples=1)
    assert code == 1
    assert "no reward" in printed
    assert "1 without a score, environment: EnvError: generate() continues token ids" in printed


def test_an_endpoint_that_refuses_is_told_once_with_its_reason(endpoint: Endpoint, evaluated: Any) -> None:
    endpoint.answer = lambda body: 401
    code, printed, rollouts = evaluated("reverse-text", in_words=True, examples=3)
    assert code == 1
    assert "3 without a score, engine: chat other" in printed
    assert "answered 401: no; set api_key_env" in printed
    assert {r["cause"] for r in rollouts} == {"engine"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that takes nothing")
def test_a_file_that_takes_no_more_is_named(endpoint: Endpoint, evaluated: Any) -> None:
    with pytest.raises(AssertionError, match=r"error: --out /dev/full: \[Errno 28\] No space left on device"):
        evaluated(
            "reverse-text", "--out", "/dev/full", examples=1
        )  # says what was said when nothing was written


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ('[[eval]]\nid = "reverse-text"', [], r"the config has no \[chat\.other\] \(it has none\)"),
        ('[chat.other]\nurl = "http://h/v1"\nmodel = "m"', [], r"has no \[\[eval\]\]"),
        (
            '[chat.other]\nurl = "http://h/v1"\nmodel = "m"\n[[eval]]\nid = "reverse-text"',
            ["--out", "/nowhere/out.jsonl"],
            "--out /nowhere/out.jsonl: no file can be written there",
        ),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], says: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'model.name = "m"\n{text}\n[[env]]\nid = "reverse-text"\n')
    assert main(["eval", str(config), "--chat", "other", *words]) == 2
    assert re.search(says, capsys.readouterr().err)
