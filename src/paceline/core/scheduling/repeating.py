"""One batch at a time, with nothing left to the clock. See `docs/repeating.md`."""

from __future__ import annotations

from paceline.core.scheduling.synchronous import Synchronous
from paceline.domain.ids import Version


class Repeating(Synchronous):
    """`synchronous`, for runs that repeat. It counts on groups being heard of in the order in which they were opened, which is
    the shell's to see to."""

    repeats = True

    def may_cut(self, step: int, held: Version) -> bool:
        # The trainer would make the next version, and evals under way would go on under that.
        return super().may_cut(step, held) and not self.desk.measuring
