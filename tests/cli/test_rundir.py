"""Which directory a run takes, or goes on in."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.rundir import existing_run_dir
from paceline.config import RunConfig
from paceline.errors import ConfigError


def test_a_directory_that_is_no_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"name": "m"}, "env": [{"id": "reverse-text"}]})
    with pytest.raises(ConfigError, match="is no run directory"):
        existing_run_dir(config, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
