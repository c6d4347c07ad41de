"""What an engine makes of the calls it is sent while it says that it is busy (429): some of them, or none at all.

A busy engine works off what it has, so its word alone is no reason to give it up. One that has taken no call for a long
time says so for another reason: a quota that is used up, a limit in front of it, a queue that never moves.
"""

from __future__ import annotations

from typing import Final

import msgspec

_QUICK_S: Final = 30.0
"""Far beyond a refusal with its retries (seconds), and the longest wait before a turn asks again (8 s)."""


class Refusals(msgspec.Struct, frozen=True, gc=False):
    """Calls in a row that one engine has refused as busy, since anything of it came, or since it was last asked at all."""

    calls: int
    since: float
    """When the first of them came back."""
    last: float
    """When the latest did."""
    slowest_s: float
    """The longest that one of them took."""
    said: str
    """With the latest."""

    @property
    def within_s(self) -> float:
        """A call that is under way for longer was taken; and while turns ask at all, one is refused at least as often."""
        return max(_QUICK_S, 2.0 * self.slowest_s)

    def took(self, granted_at: float) -> bool:
        """Whether the engine is at work on a call that was granted then, and is under way."""
        return self.last - granted_at > self.within_s


def one_more(before: Refusals | None, seconds: float, said: str, now: float) -> Refusals:
    """After a call that took `seconds` to be refused."""
    if before is None or now - before.last > before.within_s:
        # Nobody has asked for a while, so nothing could have come.
        return Refusals(1, now, now, seconds, said)
    return Refusals(before.calls + 1, before.since, now, max(before.slowest_s, seconds), said)
