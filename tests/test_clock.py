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
    "cli/status.py": {"time.time"},
    "runtime/gateway/session.py": {"time.time"},
    "tokens/tokenizer.py": {"datetime.now"},
}
"""Where the time of day is shown to somebody: at the foot of a report, in `status.json` (`started`, `ended`), in an answer's `created`, to a chat template."""


def test_only_what_is_shown_to_somebody_asks_for_the_time_of_day() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            base = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            for name in {f"{base}.{node.attr}", node.attr} & WALL:
                found.setdefault(str(path.relative_to(SOURCE)), set()).add(name)
    assert found == SHOWN
