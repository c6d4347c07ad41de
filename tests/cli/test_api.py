"""`paceline.run` from Python: what its overrides come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.api import _loaded


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "m"\n[[env]]\nid = "e:E"\n')
    return path


@pytest.mark.parametrize("text", ["5", "none", "true", "[1]", "a, b", 'say "so"', "<none>"])
def test_a_text_in_the_arguments_of_an_environment_stays_that_text(file: Path, text: str) -> None:
    loaded = _loaded(file, {"env.0.args": {"word": text}, "run.name": "5"})
    assert loaded.value.env[0].args == {"word": text}
    assert loaded.value.run.name == "5"


def test_other_values_keep_their_kind(file: Path) -> None:
    given = {"number": 5, "share": 0.5, "on": True, "none": None, "list": ["1", 2], "path": Path("a/b")}
    loaded = _loaded(file, {"env.0.args": given, "env": {"0.weight": 2}})
    assert loaded.value.env[0].args == given | {"path": "a/b"}
    assert loaded.value.env[0].weight == 2
