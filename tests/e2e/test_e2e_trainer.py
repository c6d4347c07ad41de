"""`paceline trainer`: the reference trainer by itself, on a run that waits for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_kit import CommandLine, acknowledged, flags

from paceline.cli import main as cli

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

OPTIONS: dict[str, Any] = {"trainer__type": "external", "run__max_steps": 6, "checkpoint__every": 2}


def trainer(root: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "trainer",
        str(root / "empty.toml"),
        "--run",
        str(root / "t"),
    ]
    return subprocess.Popen(
        [*command, *flags(**OPTIONS)[:-1], "--trainer.lr=5e-4", "--checkpoint.every=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(400)  # torch is imported by three processes
def test_the_reference_trainer_by_itself_stops_at_ctrl_c_and_goes_on_from_there(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, **OPTIONS)
    run.when(lambda: "waiting for a trainer on" in run.said)
    with trainer(tmp_path) as first:
        run.when(lambda: first.poll() is not None or 3 in acknowledged(run.run_dir), within_s=200)
        assert first.poll() is None, first.communicate()[1]
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=30)[1].splitlines()
    assert first.returncode == 0
    # Nothing but these two lines: no progress bars.
    assert said[0] == f"training in {run.run_dir} from v0"
    stopped = int(said[1].removeprefix("trained to v"))
    assert len(said) == 2
    assert 3 <= stopped < 6
    with trainer(tmp_path) as second:
        assert run.end(within_s=120) == 0
        assert (
            second.communicate(timeout=30)[1].splitlines()[0] == f"training in {run.run_dir} from v{stopped}"
        )
    assert second.returncode == 0
    assert sorted(acknowledged(run.run_dir)) == [1, 2, 3, 4, 5, 6]
    assert run.said.count("waiting for a trainer") == 1


def test_a_run_that_has_a_trainer_gets_no_second_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('[trainer]\ntype = "reference"\n')
    config = tmp_path / "run.toml"
    config.touch()
    assert cli.main(["trainer", str(config), "--run", str(tmp_path), *flags()]) == 2
    assert "has a trainer of its own" in capsys.readouterr().err
