"""Questions and answers from files, with a scorer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_kit import three_steps

from paceline.envs import make_environment
from paceline.envs.adapters.data import contains, last_number
from paceline.errors import ConfigError
from paceline.testing import play

ROWS = [{"question": f"{n}+{n}", "answer": f"#### {2 * n}", "note": "x"} for n in range(40)]


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return str(path)


def test_rows_become_tasks_and_what_is_held_out_is_the_same_in_any_order(jsonl: str, tmp_path: Path) -> None:
    args: dict[str, Any] = {"prompt": "Compute {question}", "scorer": "last_number", "held_out": 0.25}
    env = make_environment("data", {"path": jsonl, **args})
    train, held = env.tasks("train"), env.tasks("eval")
    assert train.size + held.size == 40  # type: ignore[operator]
    assert 3 <= held.size <= 17  # type: ignore[operator]
    turned = tmp_path / "turned.json"
    turned.write_text(json.dumps(ROWS[::-1]))
    other = make_environment("data", {"path": str(turned), **args})
    assert {json.dumps(held.get(n)) for n in range(held.size)} == {  # type: ignore[arg-type]
        json.dumps(other.tasks("eval").get(n))
        for n in range(held.size)  # type: ignore[arg-type]
    }
    row = train.get(3)
    rollout = play(env, [f"that is {row['answer'].split()[-1]}."], index=3)
    assert rollout.messages[0].content == f"Compute {row['question']}"
    assert rollout.reward == 1.0
    assert play(env, ["that is -1"], index=3).reward == 0.0


def test_parquet_holds_the_same_rows_and_chat_prompts_are_said_as_they_are(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")
    import pyarrow

    messages = [
        [{"role": "system", "content": "Brief."}, {"role": "user", "content": f"q{n}"}] for n in range(6)
    ]
    table = pyarrow.table({"prompt": messages, "answer": [f"a{n}" for n in range(6)]})
    parquet.write_table(table, tmp_path / "chat.parquet")
    env = make_environment("data", {"path": str(tmp_path / "chat.parquet"), "held_out": 0.0})
    rollout = play(env, ["a2"], index=2)
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant"]
    assert rollout.reward == 1.0


def test_a_scorer_of_ones_own_may_return_a_result_and_run_in_a_thread(
    jsonl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_scorer.py").write_text(
        "import threading\n"
        "from paceline.envs import Result\n"
        "def score(text, answer, row):\n"
        "    main = threading.current_thread() is threading.main_thread()\n"
        "    return Result(0.5, metrics={'main': float(main)}, info={'note': row['note']})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"path": jsonl, "prompt": "question", "scorer": "own_scorer:score", "blocking": True}
    rollout = play(make_environment("data", args), ["4"])
    assert (rollout.reward, rollout.metrics["main"], rollout.info) == (0.5, 0.0, {"note": "x"})
    del sys.modules["own_scorer"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"path": "nowhere.jsonl"}, "no file"),
        ({"prompt": "query"}, "has no 'query'"),
        ({"prompt": "{query}"}, "has no 'query'"),
        ({"prompt": "question", "scorer": "best"}, "none of exact, contains, last_number"),
        ({"prompt": "question", "scorer": "nowhere:score"}, "cannot be imported"),
        ({"prompt": "question", "held_out": 1.5}, "held_out"),
    ],
)
def test_what_does_not_fit_is_named(jsonl: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment("data", {"path": jsonl, **args})


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"broken.jsonl:2"):
        make_environment("data", {"path": str(path)})


def test_built_in_scorers() -> None:
    assert last_number("so 1,234.", "#### 1234", {}) == 1.0
    assert last_number("none", "4", {}) == 0.0
    assert contains("it is Rome", "Rome", {}) == 1.0


@pytest.mark.torch
@pytest.mark.demo
@pytest.mark.timeout(900)
def test_three_steps_are_trained_on_questions_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from paceline import run

    rows = [{"question": f"Compute: {a}+{b}", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {"path": str(tmp_path / "sums.jsonl"), "prompt": "question", "scorer": "last_number"}
    summary = run(three_steps(tmp_path, {"id": "data", "args": args, "group_size": 4}))
    assert (summary["status"], summary["steps"]) == ("done", 3), summary
