"""What cannot work is told at once, in one error, before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_kit import flags

import paceline
from paceline.cli.main import main
from paceline.errors import ConfigError


def refused(root: Path, capsys: pytest.CaptureFixture[str], *words: str, **options: object) -> str:
    """The one error of a run that does not begin."""
    config = root / "empty.toml"
    config.touch()
    there = sorted(root.iterdir())
    code = main(["run", str(config), *words, *flags(**{"run__dir": str(root / "runs"), **options})])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert sorted(root.iterdir()) == there, "something was left behind"
    return err


def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, trainer__learning_rate=1.0)
    assert "--trainer.learning_rate" in said
    assert "unknown option" in said


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such directory" in refused(tmp_path, capsys, model__name="/nowhere/at/all")


def test_a_run_directory_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = refused(tmp_path, capsys, run__dir=str(tmp_path / "file" / "runs"))
    assert f"{tmp_path / 'file'} is no directory" in said


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(tmp_path, capsys, metrics__prometheus__port=port)
    assert f"127.0.0.1:{port}" in said


def test_there_must_be_a_run_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run called 't'" in refused(tmp_path, capsys, "--resume")


def test_several_things_that_are_wrong_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tmp_path, capsys, env__0__id="reverse-txt", algorithm__name="grop")
    assert "2 things keep this run from starting" in said
    assert "reverse-text" in said


def test_missing_torch_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    (tmp_path / "empty.toml").touch()
    command = [sys.executable, "-m", "paceline", "run", str(tmp_path / "empty.toml")]
    done = subprocess.run(
        [*command, *flags(run__dir=str(tmp_path / "runs"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "missing: torch, transformers" in done.stderr
    assert "pip install 'paceline[train]'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_from_python_the_same_errors_are_raised(tmp_path: Path) -> None:
    config = tmp_path / "empty.toml"
    config.touch()
    with pytest.raises(ConfigError, match=r"--run\.max_stepz: unknown option"):
        paceline.run(config, run={"max_stepz": 3}, **{"env.0.id": "reverse-text", "model.name": "x"})
    with pytest.raises(ConfigError, match="there is no run directory"):
        paceline.run(
            config,
            resume=tmp_path / "runs" / "none",
            **{"env.0.id": "reverse-text", "model.name": "pkg:paceline/assets/small_policy"},
        )


async def test_inside_a_running_loop_one_is_told_to_use_a_thread(tmp_path: Path) -> None:
    with pytest.raises(paceline.errors.PacelineError, match=r"asyncio\.to_thread"):
        paceline.run(tmp_path / "run.toml")
