"""Addresses of servers: they are told everywhere, so nothing secret may be in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import ChatSection, RunConfig
from paceline.config.load import load
from paceline.engines.http import Limits, Link, Retry
from paceline.errors import ConfigError


@pytest.mark.parametrize("url", ["http://me:secret@gpu:8000", "http://token@gpu:8000", "https://:x@gpu"])
def test_an_address_with_a_password_is_refused_with_the_remedy(url: str) -> None:
    given: dict[str, Any] = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}]}
    with pytest.raises(ValidationError, match="api_key_env"):
        RunConfig.model_validate(given | {"engine": {"type": "vllm", "urls": ["http://gpu:8000", url]}})
    with pytest.raises(ValidationError, match="api_key_env"):
        ChatSection(url=url, model="judge")
    assert ChatSection(url="http://gpu:8000/v1", model="judge").url == "http://gpu:8000/v1"


@pytest.mark.parametrize(
    "address",
    ["http://me:hunter2@gpu:8000", "me:hunter2@gpu", "http://hunter2@gpu", "http://[me:hunter2@gpu"],
)
def test_no_refusal_repeats_a_password(address: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nname = "m"\n[[env]]\nid = "reverse-text"\n[engine]\ntype = "vllm"\nurls = ["{address}"]\n'
        f'[chat.judge]\nurl = "{address}"\nmodel = "m"\n'
    )
    for overrides in (
        [],
        [f"--engine.urls={address}"],
        [f"--engine.urls=[{address}"],
        [f"--run.max-steps={address}"],
    ):
        with pytest.raises(ConfigError) as caught:
            load(RunConfig, [file], overrides)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["me:hunter2@gpu", "http://[me:hunter2@gpu"])
def test_no_refusal_of_a_link_repeats_a_password(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Link(address, f"engine ({address})", Limits(), Retry())
    assert "hunter2" not in str(caught.value)
