"""Addresses of servers: they are told everywhere, so nothing secret may be in them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import ChatSection, RunConfig


@pytest.mark.parametrize("url", ["http://me:secret@gpu:8000", "http://token@gpu:8000", "https://:x@gpu"])
def test_an_address_with_a_password_is_refused_with_the_remedy(url: str) -> None:
    given: dict[str, Any] = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}]}
    with pytest.raises(ValidationError, match="api_key_env"):
        RunConfig.model_validate(given | {"engine": {"type": "vllm", "urls": ["http://gpu:8000", url]}})
    with pytest.raises(ValidationError, match="api_key_env"):
        ChatSection(url=url, model="judge")
    assert ChatSection(url="http://gpu:8000/v1", model="judge").url == "http://gpu:8000/v1"
