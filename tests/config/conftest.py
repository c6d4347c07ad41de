from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.load import Loaded, load
from paceline.errors import ConfigError

from .sample_models import Config

LoadText = Callable[..., Loaded[Config]]
ErrorOf = Callable[..., str]


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadText:
    """Load the sample config from texts (run.toml, then 2.toml, 3.toml...) and flags."""
    monkeypatch.chdir(tmp_path)

    def load_them(*texts: str, flags: str = "") -> Loaded[Config]:
        files = [Path("run.toml" if n == 0 else f"{n + 1}.toml") for n in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        return load(Config, files, flags.split())

    return load_them


@pytest.fixture
def error_of(load_text: LoadText) -> ErrorOf:
    """The message with which loading fails."""

    def fail(*texts: str, flags: str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            load_text(*texts, flags=flags)
        return str(caught.value)

    return fail
