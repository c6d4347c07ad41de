"""The gateway: where agent programs reach the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class GatewaySection(Section):
    """Where agent programs reach the policy. It starts when an environment first serves one."""

    host: str = "127.0.0.1"
    """Address to listen on. Programs on other machines need another than loopback, and each rollout's secret."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    public_url: str | None = None
    """What programs are told to reach it by, if that is not `http://host:port`: from inside containers, say."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Largest request, in megabytes: a history of about three million tokens."""
    tool_format: Literal[
        "auto",
        "none",
        "hermes",
        "qwen_xml",
        "llama",
        "mistral",
        "deepseek",
        "glm",
        "kimi",
        "gemma",
        "harmony",
    ] = "auto"
    """How the model writes tool calls; `auto` goes by the chat template."""
    thinking: Literal["content", "split"] = "content"
    """Thinking in an answer: left in the text, or given in the protocol's own place for it."""
