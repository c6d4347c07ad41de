"""Nothing that is decided, or waited for, goes by the wall clock, which may jump by hours at any moment."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
WALL = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
    *("st_mtime", "st_mtime_ns", "st_ctime", "getmtime"),
}
SHOWN = {
    "cli/report.py": {"time.localtime"},
    "cli/runs.py": {"time.time", "time.localtime"},
    "cli/status.py": {"time.time"},
    "runtime/gateway/session.py": {"time.time"},
    "tokens/tokenizer.py": {"datetime.now"},
}
"""Where the time of day is shown to somebody: at the foot of a report, in a list of runs, in `status.json`, in an
answer's `created`, to a chat template."""


def names(node: ast.AST) -> set[str]:
    """What it reads, or imports to be read, by its last two names and by its last."""
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").rpartition(".")[2]
        return {name for alias in node.names for name in (f"{module}.{alias.name}", alias.name)}
    if isinstance(node, ast.Attribute):
        base = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return {f"{base}.{node.attr}", node.attr}
    return set()


def test_both_ways_to_ask_for_it_are_seen() -> None:
    for source in (
        "from time import time as now",
        "import time; time.time()",
        "from os.path import getmtime",
    ):
        assert any(names(node) & WALL for node in ast.walk(ast.parse(source))), source


def test_only_what_is_shown_to_somebody_asks_for_the_time_of_day() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in names(node) & WALL:
                found.setdefault(str(path.relative_to(SOURCE)), set()).add(name)
    assert found == SHOWN
