"""Where a program reaches the policy of one rollout."""

from __future__ import annotations

import msgspec


class Endpoint(msgspec.Struct, frozen=True):
    """A base URL and a secret, for one rollout and as long as it is served."""

    base_url: str
    """Without `/v1`: Anthropic's SDK adds that itself."""
    secret: str

    @property
    def openai_url(self) -> str:
        return f"{self.base_url}/v1"

    @property
    def environ(self) -> dict[str, str]:
        """What the SDKs look for in a process's environment."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.secret,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.secret,
        }
