"""What an environment's `tasks` may return, and what is said of anything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from paceline.envs import EndlessTasks, Environment, ListTasks
from paceline.envs.registry import make_environment, tasks_of
from paceline.errors import ConfigError


class _Odd:
    """Something like a source of tasks."""

    def __init__(self, size: Any, fingerprint: Any = "f") -> None:
        self.size, self.fingerprint = size, fingerprint

    def get(self, index: int) -> int:
        return index


def env_of(tasks: Callable[[], Any]) -> Environment:
    class Made(Environment):
        def tasks(self, split: str) -> Any:
            return tasks()

    return Made()


async def _later() -> ListTasks:
    return ListTasks([1])


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (lambda: None, r"returned None: it lacks its `return ListTasks"),
        (lambda: [{"a": 1}], r"returned a list, .* wrap it: ListTasks"),
        (lambda: {"a": 1}, r"returned a dict, "),
        (lambda: iter([1]), r"returned a list_iterator, .* wrap it"),
        (lambda: 7, r"returned a int, .* return ListTasks"),
        (lambda: ListTasks, r"returned a type whose size is <property"),
        (_later, r"returned a coroutine: make it a plain method"),
        (lambda: _Odd("3"), r"whose size is '3'"),
        (lambda: _Odd(-1), r"whose size is -1"),
        (lambda: _Odd(True), r"whose size is True"),
        (lambda: _Odd(3, 5), r"fingerprint of its train tasks is 5"),
        (lambda: sys.exit(3), r"raised SystemExit: 3"),
    ],
)
def test_what_is_no_source_of_tasks_is_named_with_its_environment(
    tasks: Callable[[], Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        tasks_of(env_of(tasks), "train", "mine")
    assert "env 'mine'" in str(caught.value)


@pytest.mark.parametrize("source", [ListTasks([1]), EndlessTasks(lambda n: n, "f"), _Odd(None), _Odd(3)])
def test_sources_are_taken(source: Any) -> None:
    assert tasks_of(env_of(lambda: source), "train", "mine") is source


def test_a_constructor_or_a_module_that_ends_the_process_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit('no licence')\n")
    (tmp_path / "leaves_when_made.py").write_text(
        "import sys\nfrom paceline.envs import Environment\n"
        "class E(Environment):\n    def __init__(self) -> None:\n        sys.exit('no licence')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("leaves_at_once:E", "leaves_when_made:E"):
        with pytest.raises(ConfigError, match="SystemExit: no licence"):
            make_environment(module, {})
