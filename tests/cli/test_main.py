"""The command line around the commands: finding them, errors, exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from paceline.cli import main as cli
from paceline.cli.options import add_config_argument, split_overrides
from paceline.errors import ConfigError, EngineError, PacelineError

RUN = '[model]\nname = "m"\n[[env]]\nid = "arithmetic"\n'


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return str(file)


def _command(monkeypatch: pytest.MonkeyPatch, run: object, **more: object) -> None:
    """Put a command `probe` into the table."""
    module = types.ModuleType("probe")
    module.__dict__.update(run=run, add_arguments=lambda parser: None, **more)
    monkeypatch.setitem(sys.modules, "probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe", "a probe"))


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and summary in out for name, (_, summary) in cli.COMMANDS.items())


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from paceline.cli.main import main; main(['--help']);"
        "print(sorted({'pydantic', 'numpy', 'rich', 'aiohttp', 'torch', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_log_lines_reach_the_terminal_escaped() -> None:
    program = (
        "import logging, sys, types; from paceline.cli import main as cli; probe = types.ModuleType('probe');"
        "probe.add_arguments = lambda parser: None; sys.modules['probe'] = probe;"
        "probe.run = lambda args: logging.getLogger('paceline.x').warning('it says %s', '\\x1b[2J\\ud800') or 0;"
        "cli.COMMANDS['probe'] = ('probe', ''); sys.exit(cli.main(['probe']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "it says \\x1b[2J\\ud800\n"


def test_python_m_paceline_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "rnu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown command 'rnu'; did you mean `paceline run`?\n"


@pytest.mark.parametrize("error", [ConfigError("c"), EngineError("e"), PacelineError("p")])
def test_an_error_is_one_line_and_its_kind_is_the_exit_code(
    error: PacelineError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    _command(monkeypatch, fail)
    monkeypatch.delenv("PACELINE_DEBUG", raising=False)
    assert cli.main(["probe"]) == (2 if isinstance(error, ConfigError) else 1)
    assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(type(error)):
        cli.main(["probe", "--debug"])
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["probe"])


def test_a_bug_is_not_dressed_up_as_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise KeyError("oops")

    _command(monkeypatch, fail)
    with pytest.raises(KeyError):
        cli.main(["probe"])


def test_a_command_whose_module_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "run", ("paceline.cli.no_such_module", "x"))
    assert cli.main(["run"]) == 1
    assert "this installation has no `paceline run`" in capsys.readouterr().err


def test_a_command_that_needs_an_extra_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_wandb.py").write_text("import wandb\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("needs_wandb", "x"))
    assert cli.main(["probe"]) == 2
    assert "needs wandb, which is not installed: pip install 'paceline[wandb]'" in capsys.readouterr().err


def test_every_command_of_the_table_is_there() -> None:
    import importlib.util

    assert [name for name, (path, _) in cli.COMMANDS.items() if importlib.util.find_spec(path) is None] == []


@pytest.mark.parametrize(
    ("words", "own", "overrides"),
    [
        ("a.toml --x.y 3", "a.toml", "--x.y 3"),
        ("a.toml b.toml --x.y=3 --resume", "a.toml b.toml --resume", "--x.y=3"),
        ("--summary json a.toml --no-x --y -1", "--summary json a.toml", "--no-x --y -1"),
        ("--resume a.toml --x 1,2 --summary=json", "--resume a.toml --summary=json", "--x 1,2"),
    ],
)
def test_flags_that_the_command_does_not_know_are_overrides(words: str, own: str, overrides: str) -> None:
    parser = argparse.ArgumentParser(prog="p")
    add_config_argument(parser)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--summary")
    assert split_overrides(parser, words.split()) == (own.split(), overrides.split())


def test_config_show_prints_the_resolved_config_with_sources(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "show", config_file, "--model.served-name", "p"]) == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["model"]["served_name"] == "p"
    assert f'name = "m"  # {config_file}:2' in out
    assert 'served_name = "p"  # flag' in out


def test_config_show_names_what_is_wrong_by_file_and_line(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config_file).write_text(RUN.replace("id", "idd"))
    assert cli.main(["config", "show", config_file]) == 2
    assert f"{config_file}:4: unknown key 'env.0.idd'; did you mean 'id'?" in capsys.readouterr().err


def test_config_reference_and_schema_print_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "reference"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration\n")
    assert cli.main(["config", "schema"]) == 0
    assert capsys.readouterr().out.startswith('{\n  "$schema"')


def test_help_of_a_command_with_a_config_lists_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, lambda args: 0, TAKES_CONFIG=True)
    assert cli.main(["probe", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: paceline probe" in out
    assert "--env.N.group-size" in out


def test_a_wrong_argument_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "shwo"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
