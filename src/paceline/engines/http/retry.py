"""Which failed calls deserve another try, and after how long. Pure."""

from __future__ import annotations

import msgspec

NOT_JSON = b"not JSON compliant"
"""A server says this when it cannot write a NaN or infinite logprob; the same seed would sample it again."""


class Retry(msgspec.Struct, frozen=True, gc=False):
    """How often and how patiently. Waits double and carry no jitter: a run repeats itself."""

    attempts: int = 3
    first_s: float = 0.5
    most_s: float = 8.0

    def wait_s(self, failed: int, retry_after_s: float | None = None) -> float | None:
        """Seconds before the next try, after `failed` tries; None when there shall be no other.

        A server that says when to come back is obeyed, also beyond `most_s`.
        """
        if failed >= self.attempts:
            return None
        own = min(self.most_s, self.first_s * 2.0 ** (failed - 1))
        return own if retry_after_s is None else max(own, retry_after_s)


def is_transient(status: int, body: bytes) -> bool:
    """Whether the same call may succeed later. What the server refuses to understand, it always will."""
    if status >= 500:
        return NOT_JSON not in body
    return status in (408, 409, 429)


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None for its date form, which needs the server's clock."""
    try:
        seconds = float(header) if header else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86400 else None
