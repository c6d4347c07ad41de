"""Which failed calls deserve another try, and after how long. Pure."""

from __future__ import annotations

import msgspec

NOT_JSON = b"not JSON compliant"
"""A server says this when it cannot write a NaN or infinite logprob; the same seed would sample it again."""


_LONGEST_ASKED_S = 60.0
"""What a server may ask for with Retry-After. One that asks for more is asked again after this: a turn has patience of
its own with a busy engine (`runtime/patience.py`), and a control call must not sleep for hours."""


class Retry(msgspec.Struct, frozen=True, gc=False):
    """How often and how patiently. Waits double and carry no jitter: a run repeats itself."""

    attempts: int = 3
    first_s: float = 0.5
    most_s: float = 8.0

    def wait_s(self, failed: int, retry_after_s: float | None = None) -> float | None:
        """Seconds before the next try, after `failed` tries; None when there shall be no other.

        A server that says when to come back is obeyed, also beyond `most_s`, for a minute.
        """
        if failed >= self.attempts:
            return None
        own = min(self.most_s, self.first_s * 2.0 ** (failed - 1))
        return own if retry_after_s is None else max(own, min(retry_after_s, _LONGEST_ASKED_S))


def is_transient(status: int, body: bytes) -> bool:
    """Whether the same call may succeed later. What the server refuses to understand, it always will."""
    if status >= 500:
        return NOT_JSON not in body
    return status in (408, 409, 429)


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None for its date form, which needs the server's clock, and for a day or more,
    which no server can mean."""
    try:
        seconds = float(header) if header else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86400 else None
