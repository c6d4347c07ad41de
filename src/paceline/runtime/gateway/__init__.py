"""Serves agent programs that only know the OpenAI or the Anthropic API. See docs/gateway.md."""

from __future__ import annotations

from paceline.runtime.gateway.server import Gateway

__all__ = ["Gateway"]
