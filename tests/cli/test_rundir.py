"""Which directory a run takes, or goes on in."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.run import add_arguments, config_of, forgiven
from paceline.cli.rundir import existing_run_dir, keep_config, mend_status, sources_behind
from paceline.config import RunConfig
from paceline.config.dump import dump
from paceline.config.load import load
from paceline.domain.events import RunOpened
from paceline.errors import ConfigError
from paceline.journal import FileJournal
from paceline.transport.status import read_status


def test_a_directory_that_is_no_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"name": "m"}, "env": [{"id": "reverse-text"}]})
    with pytest.raises(ConfigError, match="is no run directory"):
        existing_run_dir(config, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def opened(run_dir: Path) -> None:
    async def write() -> None:
        journal = FileJournal(run_dir, "t-1")
        journal.append(0.0, RunOpened("t-1", 0), ())
        await journal.close()

    asyncio.run(write())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"run_id": "t-',
        b'{"run_id": 5, "status": "running"}',
        b"[]",
        b"\xff\xfe",
        b"[" * 9999,
        None,
    ],
)
def test_a_damaged_status_is_made_again_from_the_journal(tmp_path: Path, content: bytes | None) -> None:
    opened(tmp_path)
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    config = RunConfig.model_validate({"model": {"name": "m"}, "env": [{"id": "reverse-text"}]})
    assert existing_run_dir(config, str(tmp_path)) == tmp_path
    [note] = mend_status(tmp_path)
    assert "made again from the journal" in note
    status = read_status(tmp_path)
    assert status is not None
    assert (status.run_id, status.status) == ("t-1", "failed")
    assert mend_status(tmp_path) == []


def test_a_damaged_status_without_a_journal_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"status\.json is damaged .* without --resume"):
        mend_status(tmp_path)


def test_a_status_that_is_a_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "status.json").mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        mend_status(tmp_path)


def test_the_config_of_each_life_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("of an earlier release")
    for text in ("second", "third"):
        keep_config(tmp_path, text)
    kept = {path.name: path.read_text() for path in (tmp_path / "configs").iterdir()}
    assert kept == {
        "000001.toml": "of an earlier release",
        "000002.toml": "second",
        "000003.toml": "third",
    }
    assert (tmp_path / "config.toml").read_text() == "third"


def test_a_config_behind_forgive_is_no_environment() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--resume", "r", "--forgive", "a", "--forgive", "b", "run.toml"])
    assert (args.forgive, args.config) == (["a", "b"], [Path("run.toml")])


def test_only_environments_that_are_there_are_forgiven_and_only_by_a_run_that_goes_on() -> None:
    envs = [{"id": "reverse-text"}, {"id": "reverse-text", "name": "b"}]
    config = RunConfig.model_validate({"model": {"name": "m"}, "env": envs})
    assert forgiven(config, None, None) == ()
    assert forgiven(config, "", ["all"]) == ("reverse-text", "b")
    assert forgiven(config, "run", ["b"]) == ("b",)
    with pytest.raises(ConfigError, match="--forgive: there is no environment 'c', only 'reverse-text', 'b'"):
        forgiven(config, "", ["c"])
    with pytest.raises(ConfigError, match="add --resume"):
        forgiven(config, None, ["all"])


def test_a_run_goes_on_by_the_config_that_it_keeps_and_finds_modules_beside_its_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    source = tmp_path / "mine" / "run.toml"
    source.write_text('[model]\nname = "m"\n[[env]]\nid = "words:Words"\n[batch]\nrollouts = 24\n')
    loaded = load(RunConfig, [source], ["--run.seed", "5"])
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    keep_config(run_dir, dump(loaded.value, loaded.provenance))
    configs, beside = config_of(str(run_dir))
    again = load(RunConfig, configs)
    assert again.value == loaded.value
    # Each value still comes from where it came from at first.
    assert sources_behind(configs[0], again.provenance) == dict(loaded.provenance)
    assert beside == [tmp_path / "mine"]
    source.unlink()
    (tmp_path / "mine").rmdir()
    assert config_of(str(run_dir)) == (configs, [])


def test_where_no_config_is_given_it_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.touch()
    for words, told in (
        (["run"], "no CONFIG is given: `paceline run CONFIG`"),
        (["run", "--resume"], "only `paceline run --resume RUN` does without"),
        (["run", "--resume", str(config)], f"for a config, `paceline run {config} --resume`"),
        (["run", "--resume", str(tmp_path)], f"there is no run in {tmp_path}: it has no config.toml"),
        (["doctor"], "CONFIG"),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err
