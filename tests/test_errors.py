"""What is told of errors in other people's code: with the line of theirs that they come from, and no line of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline.envs import ListTasks, SingleTurnEnv
from paceline.errors import printable, said_by, without_password
from paceline.testing import play


def raised_by(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return said_by(caught.value)


def test_an_error_names_the_line_of_the_users_code_also_by_way_of_a_library() -> None:
    assert raised_by(lambda: {}["a"]).startswith("KeyError: 'a' (test_errors.py:")
    assert "(test_errors.py:" in raised_by(lambda: json.loads("{"))


def test_foreign_text_in_an_error_cannot_command_the_terminal() -> None:
    told = printable("a\x1b[2Jb\r\x00\u202e\ud800\n\tä")
    assert told == "a\\x1b[2Jb\\r\\x00\\u202e\\ud800\n\tä"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no http://u:pw@h:8000 here", "no http://…@h:8000 here"),
        ("http://token@h/x", "http://…@h/x"),
        ("['u:p@ss/w@h:80', 'h:80']", "['…@h:80', 'h:80']"),
        ("http://[u:pw@h", "http://…@h"),
        ("http://h:8000/v1, ask me@x.org", "http://h:8000/v1, ask me@x.org"),
    ],
)
def test_an_address_is_told_without_its_password(text: str, told: str) -> None:
    assert without_password(text) == told


def test_an_error_of_our_own_names_no_line() -> None:
    from paceline.journal import read_journal

    text = raised_by(lambda: list(read_journal("/nowhere")))
    assert text == "WireError: /nowhere: no such run directory"


class Misspelt(SingleTurnEnv):
    def tasks(self, split: str) -> Any:
        return ListTasks([{"answer": "a"}])

    def prompt(self, data: Any) -> str:
        return "a"

    def score(self, data: Any, text: str) -> float:
        return float(text == data["anwser"])


def test_a_rollout_that_cannot_be_scored_says_where() -> None:
    outcome = play(Misspelt(), ["a"]).outcome
    assert outcome.cause == "unscored"
    assert outcome.detail.startswith("ScoringError: score() raised KeyError: 'anwser' (test_errors.py:")
