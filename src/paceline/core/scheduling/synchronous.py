"""One batch at a time: start it, wait for all of it, train."""

from __future__ import annotations

from paceline.core.scheduling.base import Rounds
from paceline.domain.ids import Version


class Synchronous(Rounds):
    """Strictly on-policy: a batch is cut when nothing runs any more, and takes everything. What one round has sampled
    would be stale in the next."""

    cuts_whole = True

    def may_cut(self, step: int, held: Version) -> bool:
        return super().may_cut(step, held) and self.is_quiet
