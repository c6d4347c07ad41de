"""Tools: schemas from type hints, calls from text, errors as observations, blocking ones off the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Annotated, Any, Literal

import pytest

from paceline.config import Limits
from paceline.domain.task import Split
from paceline.envs import (
    BadCall,
    Context,
    InfrastructureError,
    ListTasks,
    PlainCalls,
    TaggedCalls,
    Tool,
    ToolBox,
    ToolCall,
    ToolEnv,
)
from paceline.envs.tools import numbered
from paceline.errors import EnvError
from paceline.testing import play


def look(
    city: str, days: Annotated[int, "How far ahead."] = 1, unit: Literal["C", "F"] = "C"
) -> dict[str, Any]:
    """The weather of a city.

    Args:
        city: Its name, in English.
    """
    return {"city": city, "days": days, "unit": unit}


def test_a_schema_is_made_of_the_hints_the_defaults_and_the_docstring() -> None:
    assert Tool(look).schema == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name, in English."},
                    "days": {"type": "integer", "description": "How far ahead.", "default": 1},
                    "unit": {"enum": ["C", "F"], "default": "C"},
                },
                "required": ["city"],
            },
        },
    }


def test_arguments_are_checked_against_the_hints_and_what_does_not_fit_is_said() -> None:
    tool = Tool(look)
    assert tool.arguments({"city": "Rome", "days": "3"}) == {"city": "Rome", "days": 3, "unit": "C"}
    for given, says in (
        ({}, "city"),
        ({"city": "Rome", "days": "soon"}, "days"),
        ({"city": "Rome", "when": 1}, "when"),
    ):
        with pytest.raises(ValueError, match=says):
            tool.arguments(given)


def test_a_function_without_hints_is_no_tool_and_neither_are_two_of_one_name() -> None:
    def bare(a):  # type: ignore[no-untyped-def]
        return a

    with pytest.raises(EnvError, match="lacks a type hint"):
        Tool(bare)
    with pytest.raises(EnvError, match="two tools are called 'look'"):
        ToolBox([look, look])


def test_calls_are_read_in_order_and_what_is_no_call_is_told() -> None:
    text = (
        'first <tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
        '<tool_call>{"name": "look", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
        '<tool_call>{"name": look}</tool_call><tool_call>{"arguments": {}}</tool_call><tool_call>{"name": "look"'
    )
    first, second, *bad = TaggedCalls().calls(text)
    assert first == ToolCall("look", {"city": "Rome"})
    assert second == ToolCall("look", {"city": "Oslo"})
    assert [type(each) for each in bad] == [BadCall] * 3
    assert TaggedCalls().calls("no call") == []
    assert PlainCalls("look", "city", "[a-z]+").calls(" rome ") == [ToolCall("look", {"city": "rome"})]
    assert PlainCalls("look", "city", "[a-z]+").calls("42") == []


def test_s87_duplicate_ids_are_made_unique() -> None:
    ids = [call.id for call in numbered([ToolCall("a", {}, "x"), ToolCall("a", {}, "x"), ToolCall("a", {})])]
    assert len(set(ids)) == 3


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments, 'id': 'same'})}</tool_call>"


class Desk(ToolEnv):
    """A calculator that does not always work."""

    tool_s = 5.0

    def __init__(self) -> None:
        self.tools = (self.divide, self.slow, self.broken, self.note)
        self.released: list[Any] = []
        self.threads: set[int] = set()

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(["go"])

    def prompt(self, data: Any) -> str:
        return data

    def state(self, data: Any, ctx: Context) -> list[Any]:
        return []

    def divide(self, a: float, b: float, state: list[Any]) -> float:
        """Divide."""
        self.threads.add(threading.get_ident())
        state.append((a, b))
        return a / b

    async def slow(self, seconds: float) -> str:
        """Take a while."""
        await asyncio.sleep(seconds)
        return "done"

    def broken(self) -> str:
        """The service is gone."""
        raise InfrastructureError("gone")

    async def note(self, text: str) -> str:
        """Say it back."""
        return text * 10

    def score(self, data: Any, state: list[Any], text: str) -> float:
        return float(len(state))

    def release(self, state: list[Any]) -> None:
        self.released.append(state)


def test_s87_three_calls_of_one_turn_are_three_executions_and_three_results_in_order() -> None:
    env = Desk()
    rollout = play(
        env,
        [call("divide", a=6, b=2) + call("divide", a=1, b=0) + call("divide", a=9, b=3), "so"],
        max_tokens=512,
    )
    assert rollout.outcome.ending == "completed"
    assert [m.content for m in rollout.messages if m.role == "tool"] == [
        m.content for m in rollout.messages[2:5]
    ]
    said = [m.content for m in rollout.messages[2:5]]
    assert "3.0" in said[0]
    assert "ZeroDivisionError" in said[1]
    assert "3.0" in said[2]
    assert rollout.reward == 3.0
    assert rollout.metrics["tool_calls"] == 3.0
    assert rollout.metrics["tool_errors"] == 1.0
    assert env.threads.isdisjoint({threading.get_ident()})
    assert len(env.released) == 1


def test_errors_are_observations_and_infrastructure_is_not() -> None:
    said = play(Desk(), [call("divde", a=1), "so"]).messages[2].content
    assert "there is no tool 'divde'" in said
    assert "divide" in said
    slow = play(Desk(), [call("slow", seconds=99), "so"])
    assert "no answer within 5 s" in slow.messages[2].content
    assert slow.ended - slow.started < 6
    env = Desk()
    assert play(env, [call("broken"), "so"]).outcome.cause == "infrastructure"
    assert len(env.released) == 1


def test_calls_of_one_turn_run_side_by_side() -> None:
    rollout = play(Desk(), [call("slow", seconds=3) * 3, "so"])
    assert 3 <= rollout.ended - rollout.started < 4


def test_a_turn_limit_keeps_the_gradeable_prefix_and_the_state_is_released_once() -> None:
    env = Desk()
    cut = play(env, [call("divide", a=1, b=1)] * 9, limits=Limits(max_turns=3))
    assert (cut.outcome.ending, cut.outcome.cause, cut.reward) == ("truncated", "turns", 3.0)
    assert len(env.released) == 1
    env = Desk()
    late = play(env, [call("divide", a=1, b=1), call("slow", seconds=4)], limits=Limits(deadline_s=2))
    assert (late.outcome.cause, late.reward, len(env.released)) == ("deadline", 1.0, 1)


def test_s40_a_long_observation_is_cut_in_the_middle() -> None:
    env = Desk()
    env.most_chars = 20
    said = play(env, [call("note", text="abcdef"), "so"]).messages[2].content
    assert "…" in said
    assert len(said) < 200


def test_the_tool_list_reaches_the_template_only_where_it_prints_one() -> None:
    class Plain(Desk):
        call_format = PlainCalls("note", "text", "[a-z]+")

    assert Desk().declares_tools
    assert not Plain().declares_tools
    rollout = play(Plain(), ["abc", "42"])
    assert rollout.metrics["tool_calls"] == 1.0


def test_a_blocking_tool_does_not_hold_up_other_rollouts(tmp_path: Any) -> None:
    loop: asyncio.AbstractEventLoop
    inside: list[float] = []
    two, others_go_on = asyncio.Event(), threading.Event()

    class Blocking(Desk):
        def divide(self, a: float, b: float, state: list[Any]) -> float:
            """Block, until the loop lets it go on."""
            inside.append(a)
            if len(inside) == 2:  # at once: none waits for the one before
                loop.call_soon_threadsafe(two.set)
            if not others_go_on.wait(100):
                raise AssertionError("the loop was held up")
            return a / b

    async def main() -> list[tuple[str, bool]]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        env = Blocking()
        ctx: Any = Context(None, group_seed=0, noise_seed=0, deadline=9e9, clock=time.monotonic)  # type: ignore[arg-type]
        calls = [ToolCall("divide", {"a": 1, "b": 1})] * 40
        told = [asyncio.create_task(env.box.observe(c, [], ctx, within_s=240, most_chars=99)) for c in calls]
        await two.wait()
        others_go_on.set()
        return await asyncio.gather(*told)

    assert asyncio.run(main()) == [("1.0", True)] * 40
