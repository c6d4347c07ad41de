"""`paceline runs`: how the runs of a folder stand, by their status and the end of their metrics."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.runs import rows_of
from paceline.errors import ConfigError
from paceline.transport.status import RunStatus, write_status


def made(folder: Path, name: str, metrics: str | None = None, **facts: object) -> Path:
    run_dir = folder / name
    run_dir.mkdir()
    write_status(run_dir, RunStatus(**{"run_id": name, "steps": 40, "host": socket.gethostname()} | facts))  # type: ignore[arg-type]
    if metrics is not None:
        (run_dir / "metrics.jsonl").write_text(metrics)
    return run_dir


def step(number: int, reward: float | None, kind: str = "step") -> str:
    return json.dumps({"kind": kind, "step": number, "train/all/reward": reward}) + "\n"


@pytest.fixture
def killed() -> int:
    """Number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_each_run_is_told_as_it_stands_oldest_first(tmp_path: Path, killed: int) -> None:
    made(tmp_path, "b", step(1, 0.25) + step(2, 0.5), status="running", started=200.0, pid=os.getpid())
    made(
        tmp_path, "a", step(40, 1.0), status="done", started=300.0, ended=360.0, trained=39, reason="step 40"
    )
    made(tmp_path, "c", status="running", started=100.0, pid=killed)
    made(tmp_path, "far", status="running", started=400.0, pid=killed, host="elsewhere")
    (tmp_path / "no run").mkdir()
    broken = made(tmp_path, "broken", step(7, None), status="done")
    (broken / "status.json").write_text("{")
    rows = {Path(row.run).name: row for row in rows_of(tmp_path, now=1000.0)}
    assert list(rows) == ["broken", "c", "b", "a", "far"]
    b = rows["b"]
    assert (b.status, b.trained, b.steps, b.reward, b.seconds) == ("running", 2, 40, 0.5, 800.0)
    assert b.reason == f"process {os.getpid()} on {socket.gethostname()}"
    a = rows["a"]
    assert (a.status, a.trained, a.reward, a.seconds, a.reason) == ("done", 39, 1.0, 60.0, "step 40")
    c = rows["c"]
    assert (c.status, c.trained, c.reward, c.seconds) == ("failed", None, None, None)
    assert c.reason == f"its process {killed} is gone: it was killed"
    # Of another host nobody here knows whether its process lives.
    assert (rows["far"].status, rows["far"].reason) == ("running", f"process {killed} on elsewhere")
    assert (rows["broken"].status, rows["broken"].trained) == ("unreadable", 7)
    assert "is no run status" in rows["broken"].reason


def test_the_newest_step_is_found_at_the_end_of_the_metrics(tmp_path: Path) -> None:
    lines = "".join(step(n, n / 1000) for n in range(1, 20_000))
    end = step(5, 0.9, "eval") + '{"kind": "step", "step": 20000, "train/a'
    made(tmp_path, "long", lines + end, status="running", pid=os.getpid())
    (row,) = rows_of(tmp_path)
    assert (row.trained, row.reward) == (19_999, 19.999)
    made(tmp_path, "none", "[1]\n5\n\xff\n", status="running", pid=os.getpid())
    assert rows_of(tmp_path / "none")[0].trained is None


def test_the_table_and_its_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "it failed\n\x1b[2J" + 300 * "x"
    made(tmp_path, "t", step(3, 0.5), status="failed", started=1e9, ended=1e9 + 4000, reason=long)
    assert main(["runs", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "steps", "reward", "began", "took", "why"]
    assert line.split()[:4] == [str(tmp_path / "t"), "failed", "3/40", "0.500"]
    assert "1h06m" in line
    assert "it failed" in line
    assert "\x1b" not in line
    assert line.endswith("x…")
    assert main(["runs", str(tmp_path / "t"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["trained"], told["reason"], told["seconds"]) == ("failed", 3, long, 4000.0)


def test_a_folder_without_runs_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        rows_of(tmp_path)
    with pytest.raises(ConfigError, match="is no directory"):
        rows_of(tmp_path / "nowhere")
