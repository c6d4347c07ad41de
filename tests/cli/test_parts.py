"""The parts of a run as commands of their own: what they are told."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

from paceline.cli import engine
from paceline.cli import main as cli
from paceline.cli.trainer import newest_start, trainer_settings
from paceline.config import RunConfig
from paceline.engines.embedded import __main__ as process
from paceline.engines.embedded.options import EngineOptions


def test_an_engine_by_itself_outlives_its_shell_and_one_of_a_run_does_not() -> None:
    by_hand = argparse.ArgumentParser()
    engine.add_arguments(by_hand)
    assert not by_hand.parse_args(["--model", "m"]).exit_with_parent
    assert by_hand.parse_args(["--model", "m", "--exit-with-parent"]).exit_with_parent
    of_a_run = EngineOptions.parser()
    process.add_arguments(of_a_run)
    assert of_a_run.parse_args(["--model", "m"]).exit_with_parent


@pytest.mark.parametrize("words", ["engine --model m", "trainer run.toml --run r"])
def test_a_part_that_needs_torch_says_what_to_install(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(words.split()) == 2
    assert "pip install 'paceline[train]'" in capsys.readouterr().err


def test_the_trainer_is_told_what_the_config_says_and_what_to_keep() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "env": [{"id": "reverse-text"}],
            "trainer": {"type": "reference", "lr": 0.5, "kl": 0.1},
            "checkpoint": {"every": 5, "keep_last": 2},
            "scheduling": {"type": "overlap", "lag": 3},
        }
    )
    told = trainer_settings(config)
    assert (told["lr"], told["kl"], told["checkpoint_every"]) == (0.5, 0.1, 5)
    assert (told["keep_last"], told["keep_weights"]) == (2, 15)
    assert not {"type", "threads", "start_s", "step_s"} & set(told)


def test_the_trainer_goes_on_from_its_newest_checkpoint_whose_weights_the_run_has(tmp_path: Path) -> None:
    assert newest_start(tmp_path) == 0
    for version in (2, 4, 6):
        (tmp_path / "checkpoints" / "trainer" / f"v{version:08d}").mkdir(parents=True)
    for version in (4, 5):
        (tmp_path / "weights" / f"v{version:06d}").mkdir(parents=True)
    assert newest_start(tmp_path) == 4
