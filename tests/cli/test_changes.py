"""Resuming under another config says what changed and what that means, or refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.cli.changes import changes_since
from paceline.config import RunConfig
from paceline.config.dump import dump
from paceline.config.load import load
from paceline.errors import ConfigError
from paceline.tokens.tokenizer import resolve_model_dir

MODEL = "pkg:paceline/assets/small_policy"
BASE = [
    f"--model.name={MODEL}",
    "--sampling.max_tokens=12",
    "--env.0.id=reverse-text",
    "--env.0.group_size=4",
    "--batch.rollouts=16",
]


def config(*flags: str) -> RunConfig:
    return load(RunConfig, [], [*BASE, *flags]).value


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(dump(config()))
    return tmp_path


def test_the_same_config_is_no_change(run_dir: Path) -> None:
    assert changes_since(run_dir, config()) == []
    assert changes_since(run_dir, config("--run.dir=elsewhere", "--run.name=other")) == []


def test_each_changed_option_is_told_with_both_values_and_what_it_means(run_dir: Path) -> None:
    lines = list(map(str, changes_since(run_dir, config("--env.0.group_size=8", "--batch.rollouts=32"))))
    assert lines == [
        "changed: env.reverse-text.group_size was 4, is 8: groups that open from here on; open ones keep the size they "
        "began with",
        "changed: batch.rollouts was 16, is 32: batches that are cut from here on; one that was cut is shipped as it was",
    ]


def test_an_environment_that_comes_or_goes_is_one_change(run_dir: Path) -> None:
    changes = changes_since(run_dir, config("--env.0.name=other"))
    assert [(c.option, c.before, c.now, c.means) for c in changes] == [
        ("env.reverse-text", "there", "absent", "its open groups are dropped"),
        ("env.other", "absent", "there", "its tasks are drawn from here on"),
    ]


def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.name was 'pkg:.*' in .* and is 'gone': .*put it back, or start"
    ):
        changes_since(run_dir, config("--model.name=gone"))
    moved = tmp_path / "moved"
    shutil.copytree(resolve_model_dir(MODEL), moved)
    assert [c.option for c in changes_since(run_dir, config(f"--model.name={moved}"))] == ["model.name"]


def test_another_environment_of_the_same_name_is_refused(run_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"was environment 'reverse-text' in .* and is 'add': .*name of its own"
    ):
        changes_since(run_dir, config("--env.0.id=add", "--env.0.name=reverse-text"))


def test_an_earlier_config_that_cannot_be_read_is_an_error(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"cannot be read, so what changed cannot be told: .*move it aside"):
        changes_since(run_dir, config())
